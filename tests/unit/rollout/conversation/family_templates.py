"""Short chat templates in the formats of families of which no published template is at hand.

They write roles, tools, thoughts, calls and results with the marks of their families. The prose of
the published templates, which explains the format to the model, is left out.
"""

from __future__ import annotations


def _joined(text: str) -> str:
    """The lines without indentation and ends; ↵ stands for a line's end."""
    return "".join(line.strip() for line in text.splitlines()).replace("↵", "{{ '\\n' }}")


_KIMI_K2 = """
{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}
{% for m in messages %}
  {% set kind = 'system' if m.role == 'tool' else m.role %}
  <|im_{{ kind }}|>{{ m.name or m.role }}<|im_middle|>
  {% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}
  {% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}↵{% endif %}
  {{ m.content or '' }}
  {% if m.tool_calls %}
    <|tool_calls_section_begin|>
    {% for call in m.tool_calls %}
      <|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>
      {{ call.function.arguments | tojson }}<|tool_call_end|>
    {% endfor %}
    <|tool_calls_section_end|>
  {% endif %}
  <|im_end|>
{% endfor %}
{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}
"""

_MINIMAX_M2 = """
]~!b[]~b]system↵
{% for tool in tools or [] %}<tool>{{ tool.function | tojson }}</tool>↵{% endfor %}
[e~[↵
{% set ns = namespace(last=-1) %}
{% for m in messages %}
  {% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{% endfor %}
{% for m in messages %}
  {% if m.role == 'tool' %}
    {% if messages[loop.index0 - 1].role != 'tool' %}]~b]tool{% endif %}
    ↵<response>{{ m.content }}</response>
    {% if loop.last or messages[loop.index0 + 1].role != 'tool' %}[e~[↵{% endif %}
  {% elif m.role == 'user' %}
    ]~b]user↵{{ m.content }}[e~[↵
  {% else %}
    ]~b]ai↵
    {% if m.reasoning_content and loop.index0 > ns.last %}
      <think>↵{{ m.reasoning_content }}↵</think>↵↵
    {% endif %}
    {{ m.content or '' }}
    {% if m.tool_calls %}
      ↵<minimax:tool_call>↵
      {% for call in m.tool_calls %}
        <invoke name="{{ call.function.name }}">↵
        {% for key, value in call.function.arguments | items %}
          <parameter name="{{ key }}">{{ value if value is string else value | tojson }}
          </parameter>↵
        {% endfor %}
        </invoke>↵
      {% endfor %}
      </minimax:tool_call>
    {% endif %}
    [e~[↵
  {% endif %}
{% endfor %}
{% if add_generation_prompt %}]~b]ai↵<think>↵{% endif %}
"""

_SEED_OSS = """
{% if tools %}
  <seed:bos>system
  {% for tool in tools %}↵def {{ tool.function.name }}: {{ tool.function.description }}{% endfor %}
  <seed:eos>
{% endif %}
{% for m in messages %}
  <seed:bos>{{ m.role }}
  {% if m.reasoning_content %}↵<seed:think>{{ m.reasoning_content }}</seed:think>{% endif %}
  {% if m.content %}↵{{ m.content }}{% if m.tool_calls %}↵{% endif %}{% endif %}
  {% for call in m.tool_calls or [] %}
    ↵<seed:tool_call>↵<function={{ call.function.name }}>↵
    {% for key, value in call.function.arguments | items %}
      <parameter={{ key }}>{{ value | string }}</parameter>↵
    {% endfor %}
    </function>↵</seed:tool_call>
  {% endfor %}
  <seed:eos>
{% endfor %}
{% if add_generation_prompt %}<seed:bos>assistant↵{% endif %}
"""

_DEEPSEEK_V31 = """
{{ bos_token }}{% for tool in tools or [] %}### {{ tool.function.name }}↵{% endfor %}
{% set ns = namespace(asked=false) %}
{% for m in messages %}
  {% if m.role == 'user' %}
    <｜User｜>{{ m.content }}{% set ns.asked = true %}
  {% elif m.role == 'tool' %}
    <｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>
  {% else %}
    {% if ns.asked %}<｜Assistant｜></think>{% endif %}{% set ns.asked = false %}
    {{ m.content or '' }}
    {% if m.tool_calls %}
      <｜tool▁calls▁begin｜>
      {% for call in m.tool_calls %}
        <｜tool▁call▁begin｜>{{ call.function.name }}<｜tool▁sep｜>
        {{ call.function.arguments + '<｜tool▁call▁end｜>' }}
      {% endfor %}
      <｜tool▁calls▁end｜>
    {% endif %}
    <｜end▁of▁sentence｜>
  {% endif %}
{% endfor %}
{% if add_generation_prompt and ns.asked %}<｜Assistant｜></think>{% endif %}
"""

_DEEPSEEK_V32 = """
{{ bos_token }}{% for tool in tools or [] %}{{ tool.function | tojson }}↵{% endfor %}
{% for m in messages %}
  {% if m.role == 'user' %}
    <｜User｜>{{ m.content }}<｜Assistant｜></think>
  {% elif m.role == 'tool' %}
    {% if messages[loop.index0 - 1].role != 'tool' %}↵↵<function_results>{% endif %}
    ↵<result>{{ m.content }}</result>
    {% if loop.last or messages[loop.index0 + 1].role != 'tool' %}
      ↵</function_results>↵↵</think>
    {% endif %}
  {% else %}
    {{ m.content or '' }}
    {% if m.tool_calls %}
      ↵↵<｜DSML｜function_calls>
      {% for call in m.tool_calls %}
        ↵<｜DSML｜invoke name="{{ call.function.name }}">
        {% for key, value in call.function.arguments | items %}
          ↵<｜DSML｜parameter name="{{ key }}"{{ ' ' }}
          string="{{ 'true' if value is string else 'false' }}">
          {{ value if value is string else value | tojson }}</｜DSML｜parameter>
        {% endfor %}
        ↵</｜DSML｜invoke>
      {% endfor %}
      ↵</｜DSML｜function_calls>
    {% endif %}
    <｜end▁of▁sentence｜>
  {% endif %}
{% endfor %}
"""

# Of versions 7 and 13 of Mistral's tokenizers.
_MISTRAL_7 = """
{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{% for m in messages %}
  {% if m.role == 'user' %}
    [INST]{{ m.content }}[/INST]
  {% elif m.role == 'tool' %}
    [TOOL_RESULTS] {"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]
  {% else %}
    {{ m.content or '' }}
    {% if m.tool_calls %}
      [TOOL_CALLS]{{ ' ' }}[
      {% for call in m.tool_calls %}
        {{ (call.function | tojson)[:-1] }}, "id": "{{ call.id }}"}{{ ', ' if not loop.last }}
      {% endfor %}
      ]
    {% endif %}
    </s>
  {% endif %}
{% endfor %}
"""
_MISTRAL_13 = """
{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{% for m in messages %}
  {% if m.role == 'user' %}
    [INST]{{ m.content }}[/INST]
  {% elif m.role == 'tool' %}
    [TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]
  {% else %}
    {% if m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}
    {{ m.content or '' }}
    {% for call in m.tool_calls or [] %}
      [TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}
    {% endfor %}
    </s>
  {% endif %}
{% endfor %}
"""

WRITTEN_HERE = {
    "kimi_k2": _joined(_KIMI_K2),
    "minimax_m2": _joined(_MINIMAX_M2),
    "seed_oss": _joined(_SEED_OSS),
    "deepseek_v31": _joined(_DEEPSEEK_V31),
    "deepseek_v32": _joined(_DEEPSEEK_V32),
    "mistral_7": _joined(_MISTRAL_7),
    "mistral_13": _joined(_MISTRAL_13),
}
