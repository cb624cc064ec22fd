"""Chat templates of common models in small, written from what they are documented to write.

Each template comes with what it writes for a turn of the assistant after its generation prompt, which is what must be
trained on, and with what it does with a system turn and with tools.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

KEPT, REFUSED, LEFT_OUT = "kept", "refused", "left out"

ARGUMENTS = '{"item": "tea", "n": 2}'
CALL = '{"name": "price", "arguments": ' + ARGUMENTS + "}"
PARAMETERS = '{"name": "price", "parameters": ' + ARGUMENTS + "}"


@dataclass(frozen=True)
class Case:
    """A template and what it does.

    Attributes:
        template: the template.
        answer: what it writes for an answer, given its content and whether it is the last turn.
        system: what becomes of a system turn.
        call: what it writes for a turn that calls a tool; `REFUSED` if it refuses the row.
        reply: what becomes of the tool's reply.
        tools: what becomes of the list of tools.
        empty: what becomes of an empty answer.
    """

    template: str
    answer: Callable[[str, bool], str]
    system: str = KEPT
    call: str = REFUSED
    reply: str = KEPT
    tools: str = KEPT
    empty: str = KEPT


def ended(end: str, begin: str = "", *, strip: bool = False) -> Callable[[str, bool], str]:
    """Every answer as it is, or stripped, between two constants."""
    return lambda content, last: begin + (content.strip() if strip else content) + end


def _prompt(text: str) -> str:
    return "{% if add_generation_prompt %}" + text + "{% endif %}"


_SYSTEM_FIRST = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}"
)
_ALTERNATE = "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate!') }}{% endif %}"

_CHATML = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"

_QWEN_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}"
    "{% endif %}{{ '# Tools\n<tools>' }}{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}"
    "{{ '\n</tools><|im_end|>\n' }}{% elif messages[0].role == 'system' %}"
    "{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}"
)
_QWEN_CALLS = (
    "{% for call in m.tool_calls %}{% if call.function %}{% set call = call.function %}{% endif %}"
    "{% if not loop.first or m.content %}{{ '\n' }}{% endif %}"
    '{{ \'<tool_call>\n{"name": "\' + call.name + \'", "arguments": \' }}{{ call.arguments | tojson }}'
    "{{ '}\n</tool_call>' }}{% endfor %}"
)
_QWEN_REPLY = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
)

_QWEN3 = (
    _QWEN_TOOLS + "{% set ns = namespace(last=messages | length - 1, looking=true) %}{% for m in messages[::-1] %}"
    "{% set index = messages | length - 1 - loop.index0 %}{% if ns.looking and m.role == 'user' and not "
    "(m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}"
    "{% set ns.looking = false %}{% set ns.last = index %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set content = m.content if m.content is string else '' %}"
    "{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "{{ '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}"
    "{% elif m.role == 'assistant' %}{% set reasoning = '' %}{% if m.reasoning_content is string %}"
    "{% set reasoning = m.reasoning_content %}{% elif '</think>' in content %}"
    "{% set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.last and (loop.last or reasoning) %}"
    "{{ '<|im_start|>assistant\n<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}"
    "{% else %}{{ '<|im_start|>assistant\n' + content }}{% endif %}{% if m.tool_calls %}"
    + _QWEN_CALLS
    + "{% endif %}{{ '<|im_end|>\n' }}{% elif m.role == 'tool' %}"
    + _QWEN_REPLY
    + "{% endif %}{% endfor %}"
    + _prompt(
        "{{ '<|im_start|>assistant\n' }}"
        "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    )
)

_MISTRAL = (
    _SYSTEM_FIRST + "{% if not tools is defined %}{% set tools = none %}{% endif %}"
    "{% set users = rest | selectattr('role', 'equalto', 'user') | list %}{{ bos_token }}{% for m in rest %}"
    "{% if m.role == 'user' %}{% if tools is not none and m == users[-1] %}{{ '[AVAILABLE_TOOLS] [' }}"
    "{% for tool in tools %}{{ tool | tojson }}{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}"
    "{{ ']' + '[/AVAILABLE_TOOLS]' }}{% endif %}{% if WHERE and system is defined %}"
    "{{ '[INST] ' + system + '\n\n' + m.content + '[/INST]' }}{% else %}{{ '[INST] ' + m.content + '[/INST]' }}"
    "{% endif %}{% elif m.tool_calls is defined and m.tool_calls is not none %}{{ '[TOOL_CALLS] [' }}"
    "{% for call in m.tool_calls %}{% set out = call.function | tojson %}"
    "{{ out[:-1] + ', \"id\": \"' + call.id + '\"}' }}{% if not loop.last %}{{ ', ' }}{% else %}{{ ']' + eos_token }}"
    "{% endif %}{% endfor %}{% elif m.role == 'assistant' %}{{ ' ' + m.content | trim + eos_token }}"
    "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS] {\"content\": ' + m.content | string + ', \"call_id\": \"' + "
    "m.tool_call_id + '\"}[/TOOL_RESULTS]' }}{% endif %}{% endfor %}"
)
_MISTRAL_CALL = "[TOOL_CALLS] [" + CALL[:-1] + ', "id": "call12345"}]</s>'

_DEEPSEEK_HEAD = (
    "{% set ns = namespace(tool=false, first=true, system='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.system = ns.system + m.content %}{% endif %}{% endfor %}{{ bos_token }}{{ ns.system }}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.tool = false %}{{ '<User>' + m.content }}"
    "{% elif m.role == 'assistant' and m.tool_calls %}{% set ns.tool = false %}{{ '<Assistant>' }}"
    "{% for call in m.tool_calls %}{% if loop.first %}{{ '<calls>' }}{% else %}{{ '\n' }}{% endif %}"
    "{{ '<call>' + call.type + '<sep>' + call.function.name + '\n```json\n' + (call.function.arguments | tojson) + "
    "'\n```</call>' }}{% endfor %}{{ '</calls><end>' }}"
)
_DEEPSEEK_TAIL = (
    "{% elif m.role == 'tool' %}{% set ns.tool = true %}{% if ns.first %}{{ '<outputs><output>' + m.content + "
    "'</output>' }}{% set ns.first = false %}{% else %}{{ '\n<output>' + m.content + '</output>' }}{% endif %}"
    "{% endif %}{% endfor %}{% if ns.tool %}{{ '</outputs>' }}{% endif %}"
)
_DEEPSEEK_CALL = "<calls><call>function<sep>price\n```json\n" + ARGUMENTS + "\n```</call></calls><end>"

_GPT_OSS = (
    "{% macro listed(tools) %}{% for tool in tools %}{{ 'type ' + tool.function.name + ' = ' }}"
    "{{ tool.function.parameters | tojson }}{{ ';\n' }}{% endfor %}{% endmacro %}"
    "{{ '<|start|>system<|message|>Knowledge cutoff: 2024-06<|end|>' }}{% if messages[0].role == 'system' %}"
    "{% set developer = messages[0].content %}{% set rest = messages[1:] %}{% else %}{% set developer = '' %}"
    "{% set rest = messages %}{% endif %}{% if developer or tools %}{{ '<|start|>developer<|message|>' }}"
    "{% if developer %}{{ '# Instructions\n\n' + developer }}{% endif %}{% if tools %}{{ listed(tools) }}{% endif %}"
    "{{ '<|end|>' }}{% endif %}{% set last = namespace(name=none) %}{% for m in rest %}{% if m.role == 'assistant' %}"
    "{% if m.tool_calls %}{% set call = m.tool_calls[0].function %}{% set last.name = call.name %}"
    "{{ '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}"
    "{{ call.arguments | tojson }}{{ '<|call|>' }}{% elif loop.last and not add_generation_prompt %}"
    "{% if m.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}{% else %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{% set last.name = none %}{% endif %}"
    "{% elif m.role == 'tool' %}{{ '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' "
    "+ m.content | tojson + '<|end|>' }}{% elif m.role == 'user' %}"
    "{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}" + _prompt("<|start|>assistant")
)

_GRANITE4 = (
    "{% if tools %}{{ '<|start_of_role|>system<|end_of_role|>' }}{% if messages[0].role == 'system' %}"
    "{{ messages[0].content + '\n\n' }}{% endif %}{{ '<tools>' }}{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}"
    "{% endfor %}{{ '\n</tools><|end_of_text|>\n' }}{% elif messages[0].role == 'system' %}"
    "{{ '<|start_of_role|>system<|end_of_role|>' + messages[0].content + '<|end_of_text|>\n' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{{ '<|start_of_role|>user<|end_of_role|>' + m.content + '<|end_of_text|>\n' }}{% elif m.role == 'assistant' %}"
    "{{ '<|start_of_role|>assistant<|end_of_role|>' + (m.content or '') }}{% if m.tool_calls %}"
    + _QWEN_CALLS
    + "{% endif %}{{ '<|end_of_text|>\n' }}{% elif m.role == 'tool' %}"
    "{{ '<|start_of_role|>user<|end_of_role|>\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{{ '<|end_of_text|>\n' }}"
    "{% endif %}{% endfor %}" + _prompt("<|start_of_role|>assistant<|end_of_role|>")
)


def _gemma(system: str) -> str:
    return (
        "{{ bos_token }}"
        + system
        + "{% for m in rest %}"
        + _ALTERNATE
        + "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
        "{% if loop.first and system is defined %}{{ system + '\n\n' }}{% endif %}"
        "{{ m.content | trim + '<end_of_turn>\n' }}{% endfor %}" + _prompt("{{ '<start_of_turn>model\n' }}")
    )


def _command(default: str) -> str:
    return (
        "{{ bos_token }}"
        + _SYSTEM_FIRST
        + "{% if system is not defined %}{% set system = "
        + default
        + " %}{% endif %}{% if system %}{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + system + "
        "'<|END_OF_TURN_TOKEN|>' }}{% endif %}{% for m in rest %}"
        + _ALTERNATE
        + "{% if m.role == 'user' %}{{ '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + m.content.strip() + "
        "'<|END_OF_TURN_TOKEN|>' }}{% else %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' + m.content.strip() + "
        "'<|END_OF_TURN_TOKEN|>' }}{% endif %}{% endfor %}"
        + _prompt("{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}")
    )


COMMON: dict[str, Case] = {
    "Llama 2": Case(
        _SYSTEM_FIRST
        + "{% for m in rest %}"
        + _ALTERNATE
        + "{% if loop.first and system is defined %}"
        "{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + m.content %}{% else %}{% set content = m.content %}"
        "{% endif %}{% if m.role == 'user' %}"
        "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% else %}"
        "{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
        ended(" </s>", " ", strip=True),
    ),
    "Llama 3": Case(
        "{% for m in messages %}"
        "{% set text = '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' %}"
        "{% if loop.first %}{% set text = bos_token + text %}{% endif %}{{ text }}{% endfor %}"
        + _prompt("{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"),
        ended("<|eot_id|>", strip=True),
    ),
    "Llama 3.1": Case(
        "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}"
        "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
        "{{ '<|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\n' + system + '<|eot_id|>' }}"
        "{% if tools %}{% set first = messages[0].content | trim %}{% set messages = messages[1:] %}"
        "{{ '<|start_header_id|>user<|end_header_id|>\n\n' }}{% for tool in tools %}{{ tool | tojson(indent=4) }}"
        "{{ '\n\n' }}{% endfor %}{{ first + '<|eot_id|>' }}{% endif %}{% for m in messages %}"
        "{% if not (m.role == 'ipython' or m.role == 'tool' or 'tool_calls' in m) %}"
        "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}"
        "{% elif 'tool_calls' in m %}{% set call = m.tool_calls[0].function %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
        "{{ '{\"name\": \"' + call.name + '\", ' + '\"parameters\": ' + (call.arguments | tojson) + '}' }}"
        "{{ '<|eot_id|>' }}{% else %}{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' }}"
        "{% if m.content is mapping or m.content is iterable %}{{ m.content | tojson }}{% else %}{{ m.content }}"
        "{% endif %}{{ '<|eot_id|>' }}{% endif %}{% endfor %}"
        + _prompt("{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"),
        ended("<|eot_id|>", strip=True),
        call=PARAMETERS + "<|eot_id|>",
    ),
    "Llama 4": Case(
        "{{ bos_token }}{% if tools %}{{ '<|header_start|>system<|header_end|>\n\n' }}{% for tool in tools %}"
        "{{ tool | tojson(indent=4) }}{{ '\n\n' }}{% endfor %}{{ '<|eot|>' }}{% endif %}{% for m in messages %}"
        "{% if m.role == 'tool' or m.role == 'ipython' %}{{ '<|header_start|>ipython<|header_end|>\n\n' }}"
        "{{ m.content | tojson }}{{ '<|eot|>' }}{% elif m.tool_calls %}"
        "{{ '<|header_start|>assistant<|header_end|>\n\n' }}{% for call in m.tool_calls %}"
        "{{ '{\"name\": \"' ~ call.function.name ~ '\", \"parameters\": ' ~ (call.function.arguments | tojson) ~ '}' }}"
        "{% endfor %}{{ '<|eom|>' }}{% else %}"
        "{{ '<|header_start|>' ~ m.role ~ '<|header_end|>\n\n' ~ m.content | trim ~ '<|eot|>' }}{% endif %}{% endfor %}"
        + _prompt("{{ '<|header_start|>assistant<|header_end|>\n\n' }}"),
        ended("<|eot|>", strip=True),
        call=PARAMETERS + "<|eom|>",
    ),
    "Mistral 0.1": Case(
        "{{ bos_token }}{% for m in messages %}"
        + _ALTERNATE
        + "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}{{ m.content + eos_token + ' ' }}"
        "{% endif %}{% endfor %}",
        ended("</s> "),
        system=REFUSED,
    ),
    "Mistral 0.3": Case(
        _MISTRAL.replace("WHERE", "loop.last"), ended("</s>", " ", strip=True), system=LEFT_OUT, call=_MISTRAL_CALL
    ),
    "Mistral Nemo": Case(
        _MISTRAL.replace("WHERE", "m == users[-1]"), ended("</s>", " ", strip=True), call=_MISTRAL_CALL
    ),
    "Mistral Small": Case(
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}"
        "{% elif m.role == 'system' %}{{ '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}"
        "{% elif m.role == 'assistant' %}{{ m.content + eos_token }}{% else %}"
        "{{ raise_exception('Only user, system and assistant roles are supported!') }}{% endif %}{% endfor %}",
        ended("</s>"),
    ),
    "Qwen 2.5": Case(
        _QWEN_TOOLS
        + "{% for m in messages %}{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
        + _CHATML
        + "{% elif m.role == 'assistant' %}{{ '<|im_start|>assistant' }}{% if m.content %}{{ '\n' + m.content }}"
        "{% endif %}{{ '\n' }}"
        + _QWEN_CALLS
        + "{{ '<|im_end|>\n' }}{% elif m.role == 'tool' %}"
        + _QWEN_REPLY
        + "{% endif %}{% endfor %}"
        + _prompt("{{ '<|im_start|>assistant\n' }}"),
        ended("<|im_end|>\n"),
        call="<tool_call>\n" + CALL + "\n</tool_call><|im_end|>\n",
    ),
    "Qwen 3": Case(
        _QWEN3,
        lambda content, last: "<think>\n\n</think>\n\n" * last + content + "<|im_end|>\n",
        call="<tool_call>\n" + CALL + "\n</tool_call><|im_end|>\n",
    ),
    "Gemma 2": Case(
        _gemma(
            "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
            "{% set rest = messages %}"
        ),
        ended("<end_of_turn>\n", strip=True),
        system=REFUSED,
    ),
    "Gemma 3": Case(_gemma(_SYSTEM_FIRST), ended("<end_of_turn>\n", strip=True)),
    "Phi 3": Case(
        "{% for m in messages %}{% if m.role == 'system' %}{{ '<|system|>\n' + m.content + '<|end|>\n' }}"
        "{% elif m.role == 'user' %}{{ '<|user|>\n' + m.content + '<|end|>\n' }}{% elif m.role == 'assistant' %}"
        "{{ '<|assistant|>\n' + m.content + '<|end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
        lambda content, last: content + "<|end|>\n" + "</s>" * last,
    ),
    "Phi 4": Case(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}{% endfor %}"
        + _prompt("{{ '<|im_start|>assistant<|im_sep|>' }}"),
        ended("<|im_end|>"),
    ),
    "DeepSeek V3": Case(
        _DEEPSEEK_HEAD
        + "{% elif m.role == 'assistant' %}{% if ns.tool %}{{ '</outputs>' + m.content + '<end>' }}"
        "{% set ns.tool = false %}{% else %}{{ '<Assistant>' + m.content + '<end>' }}{% endif %}"
        + _DEEPSEEK_TAIL
        + "{% if add_generation_prompt and not ns.tool %}{{ '<Assistant>' }}{% endif %}",
        ended("<end>"),
        call=_DEEPSEEK_CALL,
        tools=LEFT_OUT,
    ),
    "DeepSeek R1": Case(
        _DEEPSEEK_HEAD
        + "{% elif m.role == 'assistant' %}{% set content = m.content %}{% if '</think>' in content %}"
        "{% set content = content.split('</think>')[-1] %}{% endif %}{% if ns.tool %}"
        "{{ '</outputs>' + content + '<end>' }}{% set ns.tool = false %}{% else %}"
        "{{ '<Assistant>' + content + '<end>' }}{% endif %}"
        + _DEEPSEEK_TAIL
        + "{% if add_generation_prompt and not ns.tool %}{{ '<Assistant><think>\n' }}{% endif %}",
        ended("<end>"),
        call=_DEEPSEEK_CALL,
        tools=LEFT_OUT,
    ),
    "Command R": Case(_command("false"), ended("<|END_OF_TURN_TOKEN|>", strip=True)),
    "Aya": Case(_command("'You are Aya.'"), ended("<|END_OF_TURN_TOKEN|>", strip=True)),
    "GLM 4": Case(
        "[gMASK]<sop>{% if tools %}{{ '<|system|>\n# Tools' }}{% for tool in tools %}"
        "{{ '\n\n## ' + tool.function.name + '\n\n' }}{{ tool.function | tojson(indent=4) }}{% endfor %}{% endif %}"
        "{% for m in messages %}"
        "{% if m.role == 'tool' %}{{ '<|observation|>\n' + m.content }}{% elif m.tool_calls %}"
        "{% for call in m.tool_calls %}{{ '<|assistant|>' + call.function.name + '\n' }}"
        "{{ call.function.arguments | tojson }}{% endfor %}{% else %}"
        "{{ '<|' + m.role + '|>\n' + m.content }}{% endif %}{% endfor %}" + _prompt("<|assistant|>"),
        ended("", "\n"),
        call="price\n" + ARGUMENTS,
    ),
    "Granite 3": Case(
        "{% if messages[0].role != 'system' %}"
        "{{ '<|start_of_role|>system<|end_of_role|>You are Granite.<|end_of_text|>\n' }}{% endif %}"
        "{% for m in messages %}"
        "{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + '<|end_of_text|>\n' }}"
        "{% if loop.last and add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"
        "{% endfor %}",
        ended("<|end_of_text|>\n"),
    ),
    "Granite 4": Case(
        _GRANITE4,
        ended("<|end_of_text|>\n"),
        call="<tool_call>\n" + CALL + "\n</tool_call><|end_of_text|>\n",
        empty=LEFT_OUT,
    ),
    "ChatML": Case(
        "{% for m in messages %}" + _CHATML + "{% endfor %}" + _prompt("{{ '<|im_start|>assistant\n' }}"),
        ended("<|im_end|>\n"),
    ),
    "Zephyr": Case(
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>\n' + m.content + eos_token }}"
        "{% elif m.role == 'system' %}{{ '<|system|>\n' + m.content + eos_token }}{% elif m.role == 'assistant' %}"
        "{{ '<|assistant|>\n' + m.content + eos_token }}{% endif %}{{ '\n' }}"
        "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>' }}{{ '\n' }}{% endif %}{% endfor %}",
        ended("</s>\n"),
    ),
    "OLMo 2": Case(
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ '<|system|>\n' + m.content + '\n' }}"
        "{% elif m.role == 'user' %}{{ '<|user|>\n' + m.content + '\n' }}{% elif m.role == 'assistant' %}"
        "{% if not loop.last %}{{ '<|assistant|>\n' + m.content + eos_token + '\n' }}{% else %}"
        "{{ '<|assistant|>\n' + m.content + eos_token }}{% endif %}{% endif %}"
        "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}",
        ended("</s>"),
    ),
    "SmolLM 2": Case(
        "{% for m in messages %}{% if loop.first and messages[0].role != 'system' %}"
        "{{ '<|im_start|>system\nYou are SmolLM.<|im_end|>\n' }}{% endif %}"
        + _CHATML
        + "{% endfor %}"
        + _prompt("{{ '<|im_start|>assistant\n' }}"),
        ended("<|im_end|>\n"),
    ),
    # What ends a turn of gpt-oss in the history, <|end|>, is not at what the model stops.
    "gpt-oss": Case(
        _GPT_OSS,
        lambda content, last: "<|channel|>final<|message|>" + content + "<|return|>" * last,
        call=" to=functions.price<|channel|>commentary json<|message|>" + ARGUMENTS + "<|call|>",
    ),
}  # fmt: skip


def tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"item": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": "The price.", "parameters": parameters}}
