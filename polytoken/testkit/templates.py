"""Chat templates of the tiny checkpoints.

Every piece of text is an explicit expression: a template then renders alike whatever its environment does with the
white space around blocks.
"""

from __future__ import annotations

_TURNS = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
)

CHATML = _TURNS + "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"

# Qwen's convention: thinking is on unless it is refused, and a refusal is an empty thought.
CHATML_THINKING = _TURNS + (
    "{%- if add_generation_prompt -%}"
    "{{ '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false -%}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}"
    "{%- endif -%}"
    "{%- endif -%}"
)

_ROLE = "('model' if message['role'] == 'assistant' else message['role'])"

GEMMA3 = (
    "{{ bos_token }}"
    "{%- for message in messages -%}"
    "{{ '<start_of_turn>' + " + _ROLE + " + '\\n' + message['content'] + '<end_of_turn>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"
)

# Thinking is asked for by a mark at the top of a system turn; without it the answer starts with an empty thought.
GEMMA4 = (
    "{{ bos_token }}"
    "{%- set thinking = enable_thinking is defined and enable_thinking -%}"
    "{%- set has_system = messages[0]['role'] == 'system' -%}"
    "{%- if thinking or has_system -%}"
    "{{ '<|turn>system\\n' + ('<|think|>\\n' if thinking else '') }}"
    "{{ (messages[0]['content'] if has_system else '') + '<turn|>\\n' }}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] != 'system' -%}"
    "{{ '<|turn>' + " + _ROLE + " + '\\n' + message['content'] + '<turn|>\\n' }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    "{{ '<|turn>model\\n' + ('' if thinking else '<|channel>thought\\n<channel|>') }}"
    "{%- endif -%}"
)
