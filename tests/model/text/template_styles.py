"""Chat templates in the styles of the families that people use, each with its peculiarity."""

from __future__ import annotations

HERMES = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.tool_calls %}
        {{- '<|im_start|>assistant\\n' + message.content }}
        {%- for call in message.tool_calls %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
STYLES = {
    "chatml, trimmed": """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
""",
    "hermes": HERMES,
    "headers, the first call only, results as JSON": """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|header|>ipython<|end|>\\n\\n' + message.content | tojson + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|header|>assistant<|end|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson + '}<|eot|>' }}
    {%- else %}
        {{- '<|header|>' + message.role + '<|end|>\\n\\n' + message.content | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
""",
    "instructions in brackets, strict order": """\
{%- set turn = namespace(n=0) %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if turn.n % 2 %}{{ raise_exception('user and assistant must take turns') }}{% endif %}
        {%- set turn.n = turn.n + 1 %}
        {{- '[INST] ' + message.content + ' [/INST]' }}
    {%- elif message.role == 'tool' %}
        {{- '[RESULT] {"call_id": "' + message.tool_call_id + '", "content": ' }}
        {{- message.content | string + '} [/RESULT]' }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {%- set turn.n = turn.n + 1 %}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}
            {{- '[CALLS] [' + call.function | tojson + ']' + eos_token }}
        {%- endfor %}
    {%- elif message.role == 'assistant' %}
        {%- set turn.n = turn.n + 1 %}
        {{- ' ' + message.content + eos_token }}
    {%- else %}
        {{- raise_exception('only user and assistant, and no ' + message.role) }}
    {%- endif %}
{%- endfor %}
""",
    "turns of user and model": """\
{{- bos_token }}
{%- for message in messages %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {%- if role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
    {%- if role in ('user', 'model') %}
        {{- '<turn>' + role + '\\n' + message.content | trim + '<end>\\n' }}
    {%- endif %}
{%- endfor %}
""",
    "null beside calls, arguments as a string": """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'assistant' and message['content'] is none %}
        {%- for tool in message['tool_calls'] %}
            {{- '<calls>' + tool['function']['name'] + '\\n' + tool['function']['arguments'] }}
        {%- endfor %}
    {%- elif message['role'] == 'assistant' %}
        {{- '<assistant>' + message['content'].split('</think>')[-1] + eos_token }}
    {%- elif message['role'] == 'tool' %}
        {{- '<result>' + message['content'] }}
    {%- elif message['role'] == 'user' %}
        {{- '<user>' + message['content'] }}
    {%- elif message['role'] == 'system' and loop.first %}
        {{- message['content'] }}
    {%- endif %}
{%- endfor %}
""",
    "contents in parts": """\
{%- macro show(content) %}
    {%- if content is string %}{{ content }}
    {%- else %}
        {%- for part in content if part.type == 'text' %}{{ part.text }}{% endfor %}
    {%- endif %}
{%- endmacro %}
{%- for message in messages %}
    {{- '<|' + message.role + '|>' + show(message.content) }}
    {%- for call in message.tool_calls or [] %}
        {%- for name, value in call.function.arguments.items() %}
            {{- name + '=' + value }}
        {%- endfor %}
    {%- endfor %}
    {{- '<|end|>' }}
{%- endfor %}
""",
    "developers known, systems dropped": """\
{%- for message in messages %}
    {%- if message.role in ('developer', 'user', 'assistant', 'tool') %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
        {%- for call in message.tool_calls or [] %}
            {{- call.function.arguments | tojson }}
        {%- endfor %}
    {%- endif %}
{%- endfor %}
""",
    "one system message, ahead of the first question": """\
{%- if messages[0].role == 'system' %}
    {%- set system, rest = messages[0].content + '\\n\\n', messages[1:] %}
{%- else %}
    {%- set system, rest = '', messages %}
{%- endif %}
{%- for message in rest %}
    {%- if message.role == 'user' %}### Instruction:
{{ system if loop.first else '' }}{{ message.content }}

{% elif message.role == 'assistant' %}### Response:
{{ message.content }}

{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}### Response:
{% endif %}
""",
    "a word before every message": """\
{%- for message in messages -%}
{{ (message['role'] | capitalize) + ': ' + message['content'].rstrip() }}
{% endfor -%}
{% if add_generation_prompt %}Assistant:{% endif %}
""",
}
