"""Chat templates in the formats of public models, written for these tests.

`FORMATS` differ in what stands around a message alone; `WRITTEN` have logic of their own, as the
models' templates do.
"""

FORMATS: dict[str, tuple[str, ...]] = {
    # name: before the first message, before and after a user's, before and after an answer
    "ChatML": ("", "<|im_start|>user\n", "<|im_end|>\n", "<|im_start|>assistant\n", "<|im_end|>\n"),
    "ChatML, bos": (
        "{bos}",
        "<|im_start|>user\n",
        "<|im_end|>\n",
        "<|im_start|>assistant\n",
        "<|im_end|>\n",
    ),
    "Phi-4": (
        "",
        "<|im_start|>user<|im_sep|>",
        "<|im_end|>",
        "<|im_start|>assistant<|im_sep|>",
        "<|im_end|>",
    ),
    "Phi-3.5": ("", "<|user|>\n", "<|end|>\n", "<|assistant|>\n", "<|end|>\n"),
    "Zephyr": ("", "<|user|>\n", "{eos}\n", "<|assistant|>\n", "{eos}\n"),
    "TinyLlama": ("", "<|user|>\n", "{eos}\n", "<|assistant|>\n", "{eos}\n"),
    "Tulu 3": ("", "<|user|>\n", "\n", "<|assistant|>\n", "{eos}\n"),
    "OLMo 2": ("{eos}", "<|user|>\n", "\n", "<|assistant|>\n", "{eos}\n"),
    "StableLM 2": ("", "<|user|>\n", "{eos}\n", "<|assistant|>\n", "{eos}\n"),
    "Granite 3": (
        "",
        "<|start_of_role|>user<|end_of_role|>",
        "{eos}\n",
        "<|start_of_role|>assistant<|end_of_role|>",
        "{eos}\n",
    ),
    "Gemma": (
        "{bos}",
        "<start_of_turn>user\n",
        "<end_of_turn>\n",
        "<start_of_turn>model\n",
        "<end_of_turn>\n",
    ),
    "Gemma 4": ("{bos}", "<|turn>user\n", "<turn|>\n", "<|turn>model\n", "<turn|>\n"),
    "Llama 3": (
        "{bos}",
        "<|start_header_id|>user<|end_header_id|>\n\n",
        "<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|eot_id|>",
    ),
    "Llama 4": (
        "{bos}",
        "<|header_start|>user<|header_end|>\n\n",
        "<|eot|>",
        "<|header_start|>assistant<|header_end|>\n\n",
        "<|eot|>",
    ),
    "Mistral 1": ("{bos}", "[INST] ", " [/INST]", "", "{eos}"),
    "Mistral 3": ("{bos}", "[INST] ", "[/INST]", " ", "{eos}"),
    "Mistral Nemo": ("{bos}", "[INST]", "[/INST]", "", "{eos}"),
    "Command R": (
        "{bos}",
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>",
        "<|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        "<|END_OF_TURN_TOKEN|>",
    ),
    "Command A": (
        "{bos}",
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>",
        "<|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>",
        "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
    ),
    "EXAONE 3": ("", "[|user|]", "\n", "[|assistant|]", "[|endofturn|]\n"),
    "DeepSeek V2": ("{bos}", "User: ", "\n\n", "Assistant: ", "{eos}"),
    "DeepSeek V3": ("{bos}", "<｜User｜>", "", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
    "Vicuna": ("", "USER: ", " ", "ASSISTANT: ", "{eos}"),
    "LLaVA": ("", "USER: ", " ", "ASSISTANT: ", " "),
    "Alpaca": ("", "### Instruction:\n", "\n\n", "### Response:\n", "\n\n"),
    "Solar": ("", "### User:\n", "\n\n", "### Assistant:\n", "\n\n"),
    "AmberChat": ("", "###Human: ", "\n", "###Assistant: ", "\n"),
    "Falcon": ("", "User: ", "\n\n", "Falcon: ", "\n\n"),
    "OpenChat": (
        "{bos}",
        "GPT4 Correct User: ",
        "<|end_of_turn|>",
        "GPT4 Correct Assistant: ",
        "<|end_of_turn|>",
    ),
    "Jamba": ("{bos}", "<|user|> ", "<|eom|>", "<|assistant|> ", "<|eom|>"),
    "Metharme": ("", "<|user|>", "", "<|model|>", ""),
    "ChatQA": ("{bos}", "User: ", "\n\n", "Assistant: ", "\n\n"),
    "Saiga": ("", "{bos}user\n", "{eos}\n", "{bos}bot\n", "{eos}\n"),
    "InternLM 2": (
        "{bos}",
        "<|im_start|>user\n",
        "<|im_end|>\n",
        "<|im_start|>assistant\n",
        "<|im_end|>\n",
    ),
    "Yi": ("", "<|im_start|>user\n", "<|im_end|>\n", "<|im_start|>assistant\n", "<|im_end|>\n"),
    "Baichuan": ("", "<reserved_106>", "", "<reserved_107>", "{eos}"),
    "RWKV": ("", "User: ", "\n\n", "Assistant: ", "\n\n"),
    "Kimi K2": (
        "",
        "<|im_user|>user<|im_middle|>",
        "<|im_end|>",
        "<|im_assistant|>assistant<|im_middle|>",
        "<|im_end|>",
    ),
    "MiniMax": ("]~!b[", "]~b]user\n", "[e~[\n", "]~b]ai\n", "[e~[\n"),
    "Seed": ("", "{bos}user\n", "{eos}", "{bos}assistant\n", "{eos}"),
    "Hunyuan": ("{bos}", "<｜hy_User｜>", "", "<｜hy_Assistant｜>", "{eos}"),
}


def _of_format(begin: str, user: str, user_end: str, answer: str, answer_end: str) -> str:
    def text(part: str) -> str:
        named = part.replace("{bos}", "' + bos_token + '").replace("{eos}", "' + eos_token + '")
        return "'" + named.replace("\n", "\\n") + "'"

    return (
        f"{{{{- {text(begin)} -}}}}"
        "{%- for m in messages -%}{%- if m.role == 'assistant' -%}"
        f"{{{{- {text(answer)} + m.content + {text(answer_end)} -}}}}"
        "{%- else -%}"
        f"{{{{- {text(user)}.replace('user', m.role) + m.content + {text(user_end)} -}}}}"
        "{%- endif -%}{%- endfor -%}"
        f"{{%- if add_generation_prompt -%}}{{{{- {text(answer)} -}}}}{{%- endif -%}}"
    )


_THINKS = """{%- for m in messages %}
    {%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
"""
_SPLIT = """{%- set said = m.content.split('</think>')[-1].lstrip('\\n') %}
    {%- set thought = '' %}
    {%- if '</think>' in m.content %}
        {%- set thought = m.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
    {%- endif %}
"""

WRITTEN: dict[str, str] = {
    "Llama 2": """{% if messages[0]['role'] == 'system' %}
{% set turns = messages[1:] %}{% set system = messages[0]['content'] %}
{% else %}{% set turns = messages %}{% set system = false %}{% endif %}
{% for m in turns %}
{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{% if loop.index0 == 0 and system != false %}
{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + m['content'] %}
{% else %}{% set content = m['content'] %}{% endif %}
{% if m['role'] == 'user' %}{{- bos_token + '[INST] ' + content.strip() + ' [/INST]' -}}
{% else %}{{- ' ' + content.strip() + ' ' + eos_token -}}{% endif %}
{% endfor %}""",
    "Mistral, system last": """{{- bos_token }}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set turns = messages[1:] %}
{%- else %}{% set turns = messages %}{% endif %}
{%- for m in turns %}
    {%- if m.role == 'user' %}
        {%- if system is defined and loop.last or system is defined and turns | length - 2 == loop.index0 %}
            {{- '[INST] ' + system + '\\n\\n' + m.content + '[/INST]' }}
        {%- else %}{{- '[INST] ' + m.content + '[/INST]' }}{% endif %}
    {%- else %}{{- ' ' + m.content | trim + eos_token }}{% endif %}
{%- endfor %}""",
    "Phi-3, end at the end": """{% for m in messages %}
{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}""",
    "Qwen 3": "{% set ns = namespace(last=0) %}"
    + _THINKS
    + """{%- for m in messages %}
{%- if m.role == 'assistant' %}"""
    + _SPLIT
    + """
    {%- if loop.index0 > ns.last and (loop.last or thought) %}
        {{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') }}
        {{- '\\n</think>\\n\\n' + said + '<|im_end|>\\n' }}
    {%- else %}{{- '<|im_start|>assistant\\n' + said + '<|im_end|>\\n' }}{% endif %}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}""",
    "DeepSeek R1": """{{- bos_token }}{% for m in messages %}
{%- if m.role == 'assistant' %}
    {%- set said = m.content %}{% if '</think>' in said %}{% set said = said.split('</think>')[-1] %}{% endif %}
    {{- '<｜Assistant｜>' + said + '<｜end▁of▁sentence｜>' }}
{%- elif m.role == 'system' %}{{- m.content }}{% else %}{{- '<｜User｜>' + m.content }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{- '<｜Assistant｜><think>\\n' }}{% endif %}""",
    "Nemotron 3": "{% set ns = namespace(last=0) %}"
    + _THINKS
    + """{%- for m in messages %}
{%- if m.role == 'assistant' %}"""
    + _SPLIT
    + """
    {%- if loop.index0 > ns.last and thought %}
        {{- '<|im_start|>assistant\\n<think>\\n' + thought + '\\n</think>\\n' + said + '<|im_end|>\\n' }}
    {%- else %}{{- '<|im_start|>assistant\\n<think></think>' + said + '<|im_end|>\\n' }}{% endif %}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{% endif %}""",
    "GLM 4": """[gMASK]<sop>{% for m in messages %}{{- '<|' + m.role + '|>\\n' + m.content }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{% endif %}""",
    "gpt-oss": """<|start|>system<|message|>Current date: {{ strftime_now('%Y-%m-%d') }}<|end|>
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
        {%- if loop.last and not add_generation_prompt %}{{- '<|return|>' }}{% else %}{{- '<|end|>' }}{% endif %}
    {%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}""",
    "Cohere 2": """{% set ns = namespace(system=false) %}
{%- for m in messages %}
    {%- if m.role | lower == 'system' %}{% set ns.system = m.content %}{% break %}{% endif %}
{%- endfor %}
{{- bos_token }}{% if ns.system %}<|SYSTEM_TOKEN|>{{ ns.system }}<|END_OF_TURN_TOKEN|>{% endif %}
{%- for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}
{%- if m.role == 'user' %}<|USER_TOKEN|>{{ m.content }}<|END_OF_TURN_TOKEN|>
{%- else %}<|CHATBOT_TOKEN|><|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|CHATBOT_TOKEN|><|START_RESPONSE|>{% endif %}""",
    "a prompt that is always written": """{{- bos_token }}{% for m in messages %}
{%- if m.role == 'system' %}{{- '<|turn|><|system|>' + m.content + '<|end|>' }}
{%- elif m.role == 'user' %}{{- '<|turn|><|user|>' + m.content + '<|end|>' }}
{%- else %}{{- '<|turn|><|bot|><|answer|>' + m.content + '<|/answer|><|end|>' }}{% endif %}
{%- endfor %}<|turn|><|bot|>""",
    "every message has its number": """{% for m in messages %}{{- loop.index }}. {{ m.role }}: {{ m.content + '\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{- messages | length + 1 }}. assistant: {% endif %}""",
    "Llama 3.2, the day and tools": """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{% set date_string = strftime_now("%d %b %Y") %}
    {%- else %}{% set date_string = "26 Jul 2024" %}{% endif %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n<|eot_id|>" }}
{%- for m in messages %}
    {%- if tools is not none %}{{ raise_exception('no tools here') }}{% endif %}
    {%- if m.role in ('tool', 'ipython') %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + m.content | tojson + "<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>" + m.role + "<|end_header_id|>\\n\\n" + m.content | trim + "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}{% endif %}""",
    "ChatGLM, numbered turns": """{% set ns = namespace(turn=0) %}{% for m in messages %}
{%- if m.role == 'user' %}{% set ns.turn = ns.turn + 1 %}
    {{- '[Round ' ~ ns.turn ~ ']\\n\\nQ: ' + m.content + '\\n\\n' }}
{%- elif m.role == 'system' %}{{- m.content + '\\n\\n' }}
{%- else %}{{- 'A: ' + m.content + '\\n\\n' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{- 'A:' }}{% endif %}""",
    "marked answers": """{% for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
    {%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}""",
    "marked answers, stripped lines": """{% for m in messages %}
{% if m.role == 'assistant' %}
A:
    {%- generation -%}
    {{ m.content }}
    {%+ endgeneration -%}
{% else %}
U:{{ m.content }}

{% endif %}
{% endfor %}""",
}

TEMPLATES = {name: _of_format(*parts) for name, parts in FORMATS.items()} | WRITTEN
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
