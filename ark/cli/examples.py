"""Example command lines of every command, and the extras of the package that a command needs.

Called by ark.cli.parser. tests/unit/cli/test_parser.py parses every example, and runs those that
need only the CPU and little time.
"""

EXAMPLES = {
    "info": ("ark info", "ark info --require cpu:1"),
    "doctor": ("ark doctor --backend cpu",),
    "generate": (
        'ark generate examples/noah --prompt "The king said" --max-new-tokens 20',
        'ark generate examples/noah --prompt "The king" --temperature 0.8 --seed 1',
    ),
    "chat": (
        'ark chat model --system "Be brief."',
        "ark chat examples/noah --chat-template template.jinja --temperature 0.8",
    ),
    "serve": (
        "ark serve examples/noah --port 8000",
        "ark serve examples/noah --slots 4 --api-key secret",
    ),
    "run": ("ark run model.onnx --input x.npy --output y.npy",),
    "plan": (
        "ark plan examples/noah --machine cpu-2",
        "ark plan llama-3.2-1b --machine h100 --context 1024",
        "ark plan examples/noah --machine cpu-2 -o plan.json",
    ),
    "emit": ("ark emit plan.json --backend cpu -o out",),
    "export": ("ark export examples/noah --backend cpu --context 64 -o out",),
    "tune": ("ark tune matmul-512x512x512-nt-bf16 --backend cpu", "ark tune --show"),
    "trace": ("ark trace examples/noah --backend cpu -o trace.json",),
    "bench decode": (
        "ark bench decode --config examples/noah --backend cpu --tokens 16 --repeats 1",
        "ark bench decode --config llama-3.2-1b --context 512 --vs torch",
    ),
    "bench ops": (
        "ark bench ops --list",
        'ark bench ops "adds-*" --vs torch',
        'ark bench ops "matmul-4096x4096x4096-*-bf16" --isa ARCH',
    ),
    "bench comm": ("ark bench comm all_reduce --ranks 2 --sizes 1K:1M --vs gloo",),
    "bench fidelity": ("ark bench fidelity --backend cpu --json fidelity.json",),
    "bench parallel": ("ark bench parallel --config llama-3.1-8b --ranks 2 --layers 8",),
    "bench perplexity": (
        "ark bench perplexity examples/noah --text examples/noah/README.md",
        "ark bench perplexity examples/noah --text book.txt --kv-cache-dtype int8",
    ),
    "bench serve": ("ark bench serve --rate 2,8,inf --prompt 40 --tokens 32",),
    "bench torch": ("ark bench torch resnet --vs inductor",),
    "bench models": (
        "ark bench models gat-1024 dlrm-256 --vs eager --backend cpu",
        "ark bench models --vs inductor --json models.json --resume",
    ),
    "cache": ("ark cache", "ark cache clear"),
    "completion": ("ark completion bash >> ~/.bashrc",),
    "layout": ("ark layout --shape 64x64 --from R1V4D1,1 --to R4V1D1,1",),
    "parallelize": (
        "ark parallelize llama-3.1-8b --mesh 2x4 --machine h100",
        "ark parallelize llama-3.1-8b --mesh 8 --machine h100 --inference",
    ),
    "tessel": ("ark tessel X --memory 4 --micro-batches 3",),
    "topo measure": ("ark topo measure --ranks 2 --out here.json",),
    "topo detect": ("ark topo detect --json",),
    "topo show": ("ark topo show a100x2",),
    "topo optimal": ("ark topo optimal a100x2",),
    "topo synthesize": (
        "ark topo synthesize ring4 --collective all_reduce --algorithm ring",
        "ark topo synthesize a100x2 --target msccl --out program.xml",
    ),
    "topo simulate": ("ark topo simulate a100x2 --collective all_gather --size 1M",),
    "topo compare": ("ark topo compare ring4 --size 1M --html compare.html",),
}

NEEDS = {
    "serve": "serve",
    "run": "onnx",
    "bench torch": "torch",
    "bench models": "torch",
    "bench parallel": "parallel",
    "parallelize": "parallel",
    "tessel": "parallel",
    "topo measure": "comm",
    "topo detect": "comm",
    "topo show": "comm",
    "topo optimal": "comm",
    "topo synthesize": "comm",
    "topo simulate": "comm",
    "topo compare": "comm",
}
