"""Chat templates similar to published ones, written for the tests."""

CHATML = """{%- for message in messages %}
<|im_start|>{{ message.role }}
{{ message['content'] | trim }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""

HEADERS = """{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = "26 Jul 2024" %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start|>system<|end|>\\n\\nToday: " + date_string + "\\n" + system_message + "<|eot|>" }}
{%- if tools is not none %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- "<|start|>ipython<|end|>" + (message.content | tojson) + "<|eot|>" }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("only single tool calls") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + "}" }}
    {%- else %}
        {{- "<|start|>" + message['role'] + "<|end|>\\n\\n" }}
        {{- message['content'] | trim + "<|eot|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start|>assistant<|end|>\\n\\n" }}{%- endif %}"""

ALTERNATING = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/...') }}
{% endif %}
{% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}
{{ message['content'] + eos_token }}
{% else %}
{{ raise_exception('Only user and assistant roles are supported!') }}
{% endif %}
{% endfor %}"""

TURNS = """{{ bos_token }}{% set ns = namespace(first=true, last_user=-1) %}
{%- for message in messages %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- set m = messages[index] %}
    {%- if ns.first and m.role == "user" %}
        {%- set ns.first = false %}
        {%- set ns.last_user = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {{- '<turn>' + role + '\\n' }}
    {%- if message.content is string %}{{- message.content | trim }}
    {%- elif message.content is iterable %}
        {%- for item in message.content %}
            {%- if item.type == 'image' %}{{- '<image>' }}
            {%- elif item.type == 'text' %}{{- item.text | trim }}{%- endif %}
        {%- endfor %}
    {%- endif %}
    {%- if loop.index0 > ns.last_user and message.reasoning_content is defined %}
        {{- '<think>' + message.reasoning_content.strip('\\n') + '</think>' }}
    {%- endif %}
    {{- '</turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<turn>model\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think></think>' }}
    {%- endif %}
{%- endif %}"""

MACROS = """{%- macro block(role, text) -%}
    <{{ role }}>{{ text }}</{{ role }}>
{%- endmacro -%}
{%- for message in messages -%}
    {%- if message.role == 'skip' %}{% continue %}{% endif -%}
    {%- if message.role == 'halt' %}{% break %}{% endif -%}
    {% generation %}{{ block(message.role, message.content | upper) }}{% endgeneration %}
    {#- a comment -#}
    {{ loop.index ~ (',' if not loop.last) }}
{%- endfor -%}
{%- for key, value in {'a': 1, 'b': [1, 2]} | dictsort %}{{ key }}={{ value }};{% endfor -%}
{{ messages | map(attribute='role') | join('-') }}{{ "%s" | format(unk_token | default('none')) }}
{{- strftime_now("%Y") }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{%- if documents %}{% for d in documents %}{{ d['title'] }}{% endfor %}{% endif -%}"""

EVERY = {
    "chatml": CHATML,
    "headers": HEADERS,
    "alternating": ALTERNATING,
    "turns": TURNS,
    "macros": MACROS,
}
