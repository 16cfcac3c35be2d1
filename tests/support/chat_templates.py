"""Chat templates in the manner of well-known families, written for these tests: minimal, but alike
in structure."""

from __future__ import annotations

_TOOLS = """
{%- macro described(tools) -%}
# Tools

You may call one or more functions. Their signatures stand in <tools></tools>:
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>

For each call give a JSON object within <tool_call></tool_call>:
<tool_call>
{"name": <name>, "arguments": <object>}
</tool_call>
{%- endmacro -%}
"""

_HEAD = """
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}
{%- else %}{% set system = 'You are a helpful assistant.' %}{% set rest = messages %}{% endif -%}
{{- '<|im_start|>system\\n' + system }}
{%- if tools %}{{ '\\n\\n' + described(tools) }}{% endif %}
{{- '<|im_end|>\\n' }}
"""

_RESULTS_AS_USER = """
{%- elif message.role == 'tool' %}
    {%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
    {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
"""

_CALLS = """
    {%- for tool_call in message.tool_calls or [] %}
        {%- if (loop.first and content) or not loop.first %}{{ '\\n' }}{% endif %}
        {%- set tool_call = tool_call.function if tool_call.function is defined else tool_call %}
        {{- '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' + tool_call.arguments | tojson + '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
"""

QWEN25 = (
    _TOOLS
    + _HEAD
    + """
{%- for message in rest %}
{%- if message.role == 'user' %}
    {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
    {%- set content = message.content or '' %}
    {{- '<|im_start|>assistant\\n' + content }}"""
    + _CALLS
    + _RESULTS_AS_USER
    + """
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
)
"""Results are a user's turn; content stays as it is."""

QWEN3 = (
    _TOOLS
    + _HEAD
    + """
{%- set ns = namespace(last_query=-1) %}
{%- for message in rest %}
    {%- if message.role == 'user' and not message.content.startswith('<tool_response>') %}
        {%- set ns.last_query = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in rest %}
{%- if message.role == 'user' %}
    {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
    {%- set content = message.content or '' %}
    {%- set reasoning = '' %}
    {%- if '</think>' in content %}
        {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if loop.index0 > ns.last_query and (loop.last or reasoning) %}
        {{- '<think>\\n' + reasoning + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- content }}"""
    + _CALLS
    + _RESULTS_AS_USER
    + """
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
)
"""Thoughts are kept behind the last question, and dropped before it."""

QWEN3_OPEN = QWEN3.replace(
    "{%- if enable_thinking is defined", "{{- '<think>\\n' }}{%- if enable_thinking is defined"
)
"""The opening of a turn opens the thought."""

HERMES = (
    _TOOLS
    + _HEAD
    + """
{%- for message in rest %}
{%- if message.role in ('user', 'system') or (message.role == 'assistant' and not message.tool_calls) %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
    {{- '<|im_start|>assistant' }}
    {%- if message.content %}{{ '\\n' + message.content }}{% endif %}
    {%- for tool_call in message.tool_calls %}
        {%- set tool_call = tool_call.function if tool_call.function is defined else tool_call %}
        {{- '\\n<tool_call>\\n{"arguments": ' + tool_call.arguments | tojson }}
        {{- ', "name": "' + tool_call.name + '"}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
    {%- if loop.previtem and loop.previtem.role != 'tool' %}{{ '<|im_start|>tool\\n' }}{% endif %}
    {{- '<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- if not loop.last %}{{ '\\n' }}{% endif %}
    {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
)
"""Arguments before the name, a role of results, and a line break that comes only once more
follows."""

LLAMA31 = """
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}
{%- else %}{% set system = '' %}{% set rest = messages %}{% endif -%}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools %}{{ 'Environment: ipython\\n' }}{% endif %}
{{- 'Today Date: ' + (date_string or '26 Jul 2024') + '\\n\\n' + system + '<|eot_id|>' }}
{%- for message in rest %}
{%- if message.role == 'user' %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' }}
    {%- if loop.first and tools %}
        {{- 'Answer with {"name": name, "parameters": object} to call one of these functions.\\n\\n' }}
        {%- for tool in tools %}{{ tool | tojson(indent=4) + '\\n\\n' }}{% endfor %}
    {%- endif %}
    {{- message.content | trim + '<|eot_id|>' }}
{%- elif message.tool_calls %}
    {%- if message.tool_calls | length != 1 %}
        {{- raise_exception('This model only supports single tool-calls at once!') }}
    {%- endif %}
    {%- set tool_call = message.tool_calls[0].function %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
    {{- '{"name": "' + tool_call.name + '", "parameters": ' + tool_call.arguments | tojson + '}<|eot_id|>' }}
{%- elif message.role in ('tool', 'ipython') %}
    {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
    {%- if message.content is mapping or message.content is iterable %}{{ message.content | tojson }}
    {%- else %}{{ message.content }}{% endif %}
    {{- '<|eot_id|>' }}
{%- else %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
"""A call is the whole turn, bare JSON, one at a time; what stands before it is dropped; results are
JSON texts."""

MISTRAL = """
{{- bos_token }}
{%- if tools %}{{ '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for message in messages %}
{%- if message.role in ('user', 'system') %}{{ '[INST] ' + message.content + '[/INST]' }}
{%- elif message.tool_calls %}
    {{- '[TOOL_CALLS] [' }}
    {%- for call in message.tool_calls %}
        {{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
        {{- ', "id": "' + call.id + '"}' }}{{ ', ' if not loop.last }}
    {%- endfor %}
    {{- ']' + eos_token }}
{%- elif message.role == 'tool' %}
    {{- '[TOOL_RESULTS] {"content": ' + message.content | tojson + ', "call_id": "' }}
    {{- message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}{{ ' ' + message.content + eos_token }}
{%- endif %}
{%- endfor %}"""
"""The id of each call stands beside its result."""

GOOD = {
    "qwen25": QWEN25,
    "qwen3": QWEN3,
    "qwen3-open": QWEN3_OPEN,
    "hermes": HERMES,
    "llama31": LLAMA31,
}

_CONTENT = "{%- set content = message.content or '' %}"

DROPPING = QWEN25.replace(
    _CONTENT,
    "{%- set content = message.content if loop.last else message.content.split('</think>')[-1] %}",
)
"""Shows thoughts in the last turn alone."""

BAD = {
    "has no chat template": "",
    "does not show the agent its tools": QWEN25.replace("{%- if tools %}", "{%- if false %}"),
    "drops text before a tool call": QWEN25.replace(
        _CONTENT, "{%- set content = message.content.split('</think>')[-1] %}"
    ),
    "leaves out the agent's tool calls": QWEN25.replace("message.tool_calls or []", "[]"),
    "does not write calls as JSON": (
        QWEN25.replace('\\n{"name": "', "<function=").replace(', "arguments": ', "> ")
    ),
    "no place for a tool's result": QWEN25.replace(
        "message.role == 'tool'", "message.role == 'function'"
    ),
    "a conversation with tool calls: there are no tools": QWEN25.replace(
        "{%- elif message.role == 'tool' %}",
        "{%- elif message.role == 'tool' %}{{ raise_exception('there are no tools') }}",
    ),
    "writes earlier turns differently once a tool's result follows": QWEN25.replace(
        "'<|im_start|>assistant\\n' + content",
        "'<|im_start|>assistant\\n' + ('' if loop.last else 'Earlier: ') + content",
    ),
    "does not continue the prompt": QWEN25.replace(
        "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}",
        "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\nSure: ' }}",
    ),
    "none of the tokens that end a completion": QWEN25.replace(
        "{%- endfor %}\n    {{- '<|im_end|>\\n' }}", "{%- endfor %}\n    {{- '\\n' }}"
    ),
    "plain text alone marks": (
        QWEN25.replace("\\n<tool_response>\\n", "\\nResult: ")
        .replace("\\n</tool_response>", "")
        .replace("{{ '<|im_start|>user' }}", "{{ 'Tool' }}")
    ),
    "the name of each call beside": QWEN25.replace(
        "'\\n<tool_response>\\n' +", "'\\n<tool_response>\\n' + message.name +"
    ),
    "the tool_call_id of each call": QWEN25.replace(
        "'\\n<tool_response>\\n' +", "'\\n<tool_response>\\n' + message.tool_call_id +"
    ),
    "writes what cannot be read back": QWEN25.replace(
        _CONTENT, "{%- set content = message.content if message.tool_calls else '' %}"
    ),
}
"""What a template cannot be used for, with the words of the error."""
