from ark import comm as comm
from ark import distributed as distributed
from ark import errors
from ark import log as log
from ark import ops as ops
from ark import parallel as parallel
from ark import profiler as profiler
from ark._version import __version__ as __version__
from ark.api.context import PlannerContext as PlannerContext
from ark.api.core import Dims as Dims
from ark.api.init import init as init
from ark.api.init import set_rank as set_rank
from ark.api.init import set_world_size as set_world_size
from ark.api.module import Module as Module
from ark.api.plan import Plan as Plan
from ark.api.planner import Planner as Planner
from ark.api.profiler import Profiler as Profiler
from ark.api.state import load as load
from ark.api.state import save as save
from ark.errors import BaseError as BaseError
from ark.errors import GpuError as GpuError
from ark.errors import InternalError as InternalError
from ark.errors import InvalidUsageError as InvalidUsageError
from ark.errors import ModelError as ModelError
from ark.errors import PlanError as PlanError
from ark.errors import SystemError as SystemError
from ark.errors import UnsupportedError as UnsupportedError
from ark.frontend.model import Model as Model
from ark.frontend.model import current_model as current_model
from ark.frontend.model import set_model as set_model
from ark.frontend.model import use_model as use_model
from ark.frontend.tensor import NullTensor as NullTensor
from ark.frontend.tensor import Parameter as Parameter
from ark.frontend.tensor import Tensor as Tensor
from ark.gradients import grad as grad
from ark.gradients import optim as optim
from ark.interop import from_onnx as from_onnx
from ark.interop import from_torch as from_torch
from ark.interop import inference_model as inference_model
from ark.interop import training_model as training_model
from ark.ir.dtype import DataType as DataType
from ark.ir.dtype import bf16 as bf16
from ark.ir.dtype import bool_ as bool_
from ark.ir.dtype import byte as byte
from ark.ir.dtype import fp4 as fp4
from ark.ir.dtype import fp8_e4m3 as fp8_e4m3
from ark.ir.dtype import fp8_e5m2 as fp8_e5m2
from ark.ir.dtype import fp16 as fp16
from ark.ir.dtype import fp32 as fp32
from ark.ir.dtype import int4 as int4
from ark.ir.dtype import int8 as int8
from ark.ir.dtype import int32 as int32
from ark.ir.dtype import int64 as int64
from ark.ir.dtype import uint4 as uint4
from ark.ir.dtype import uint8 as uint8
from ark.ir.dtype import uint32 as uint32
from ark.models.sampling import SamplingParams as SamplingParams
from ark.models.structured import StructuredOutputsParams as StructuredOutputsParams
from ark.ops import *
from ark.parallel import parallelize as parallelize
from ark.runtime.launch import launch as launch
from ark.runtime.runtime import Runtime as Runtime
from ark.serving.llm import LLM as LLM

error = errors
bool: DataType
FP8_E4M3: DataType
FP8_E5M2: DataType

def version() -> str: ...
