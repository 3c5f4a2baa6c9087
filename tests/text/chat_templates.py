"""Chat templates of the kinds that make histories drift, written for these tests after the field's conventions."""

from __future__ import annotations

# ChatML with a default system prompt.
PLAIN = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_TOOL_LIST = (
    "{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}"
    "{%- if tools or system -%}{{ '<|im_start|>system\\n' + system }}"
    "{%- if tools -%}{{ '\\nTools:\\n' }}{%- for tool in tools -%}{{ (tool | tojson) + '\\n' }}{%- endfor -%}"
    "{{ 'Call them inside <tool_call></tool_call>.' }}{%- endif -%}{{ '<|im_end|>\\n' }}{%- endif -%}"
)
_CALLS = (
    "{%- for call in m.tool_calls or [] -%}"
    "{{ '\\n<tool_call>\\n' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson)"
    " + '\\n</tool_call>' }}{%- endfor -%}"
)
_TOOL_RESULT = "{{ '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}"

# Reasoning is stripped from all turns in front of the last question; the prompt opens the block.
REASONING = _TOOL_LIST + (
    "{%- set place = namespace(last=0) -%}"
    "{%- for m in messages -%}"
    "{%- if m.role == 'user' -%}{%- set place.last = loop.index0 -%}{%- endif -%}"
    "{%- endfor -%}"
    "{%- for m in messages -%}"
    "{%- if m.role == 'assistant' -%}{{ '<|im_start|>assistant\\n' }}"
    "{%- if loop.index0 > place.last -%}"
    "{{ '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}"
    "{%- endif -%}"
    "{{ m.content.split('</think>')[-1].strip() }}" + _CALLS + "{{ '<|im_end|>\\n' }}"
    "{%- elif m.role == 'tool' -%}" + _TOOL_RESULT + "{%- elif m.role != 'system' -%}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}"
    "{{ '<think>\\n' if enable_thinking else '<think>\\n\\n</think>\\n\\n' }}{%- endif -%}"
)

# No reasoning, calls in JSON.
HERMES = _TOOL_LIST + (
    "{%- for m in messages -%}"
    "{%- if m.role == 'assistant' -%}{{ '<|im_start|>assistant\\n' + m.content }}" + _CALLS + "{{ '<|im_end|>\\n' }}"
    "{%- elif m.role == 'tool' -%}" + _TOOL_RESULT + "{%- elif m.role != 'system' -%}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)

# Calls and their results belong to one turn of the model, which goes on behind the result without a new opening.
GEMMA = (
    "{{ bos_token }}"
    "{%- if tools -%}{{ '<|turn>system\\n' + (tools | tojson) + '<turn|>\\n' }}{%- endif -%}"
    "{%- set open = namespace(turn=false) -%}"
    "{%- for m in messages -%}"
    "{%- if m.role == 'assistant' -%}"
    "{%- if not open.turn -%}{{ '<|turn>model\\n' }}{%- endif -%}"
    "{{ m.content.strip() }}"
    "{%- for call in m.tool_calls or [] -%}{{ '<|tool_call>call:' + call.function.name + '{' }}"
    "{%- for key, value in call.function.arguments.items() -%}"
    "{{ key + ':<|\"|>' + (value | string) + '<|\"|>' + ('' if loop.last else ',') }}{%- endfor -%}"
    "{{ '}<tool_call|>' }}{%- endfor -%}"
    "{%- set open.turn = (m.tool_calls or []) | length > 0 -%}"
    "{%- if not open.turn -%}{{ '<turn|>\\n' }}{%- endif -%}"
    "{%- elif m.role == 'tool' -%}{{ '<|tool_response>' + m.content + '<tool_response|>' }}"
    "{%- else -%}{{ '<|turn>' + m.role + '\\n' + m.content + '<turn|>\\n' }}{%- set open.turn = false -%}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt and not open.turn -%}{{ '<|turn>model\\n' }}{%- endif -%}"
)
