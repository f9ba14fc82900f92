"""Chat templates as models have them, and every operation that is rendered in the API's process."""

# ruff: noqa: E501 - a template is one line

from __future__ import annotations

from pathlib import Path

from tests.integration.api.calling import TEMPLATE

DEMO = Path("ops/demo/model/chat_template.jinja").read_text()
ORDINARY = {
    "demo": DEMO,
    "tools": TEMPLATE,
    "alternating": "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ '!' }}{% endif %}"
    "{{ loop.index ~ '/' ~ loop.length ~ m['role'] }}{% if not loop.last %}, {% endif %}{% endfor %}",
    "slices": "{% set rest = messages[1:] %}{% for m in rest[::-1] %}{{ m.role[:2] ~ m.role[-1] }}{% endfor %}"
    "{{ messages[-1].role }}",
    "reasoning": "{% set c = '<think>a</think> b' %}{{ c.split('</think>')[-1].lstrip('\\n') }}|{{ c.split('</think>')[0].rstrip()"
    ".split('<think>')[-1] }}{{ '</think>' in c }}{{ c is string and c.startswith('<think>') }}",
    "namespaces": "{% set ns = namespace(system='', n=0, last=-1) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% if m.role == 'system' %}{% set ns.system = ns.system + m.content + '\n' %}{% endif %}"
    "{% if m.role != 'tool' and ns.n > ns.last %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{{ ns.system ~ ns.n ~ ns.last }}",
    "macros": "{% macro value(v, deep=0) %}{% if v is mapping %}{% for k, x in v|dictsort %}{{ k }}={{ value(x, deep + 1) }};"
    "{% endfor %}{% elif v is iterable and v is not string %}[{% for x in v %}{{ value(x, deep + 1) }},{% endfor %}]"
    "{% else %}{{ v }}{% endif %}{% endmacro %}{% for m in messages %}{{ value(m) }}{% endfor %}",
    "filters": "{{ messages|map(attribute='role')|join(', ') }}{{ messages|selectattr('role', 'equalto', 'user')|list|length }}"
    "{{ (messages|rejectattr('role', 'in', ['tool', 'system'])|first).role }}{{ messages|map(attribute='role')|unique|list }}"
    "{{ tools|tojson(indent=2) }}{{ messages[0]|tojson }}{{ messages[0].items()|list }}{{ messages[1].content|trim|upper|replace('X', 'y') }}"
    "{{ messages[1].content|indent(4) }}{{ nothing|default('none') }}{{ messages|last|string }}{{ messages|reverse|list|length }}",
    "loops": "{% for m in messages if m.role != 'tool' %}{{ loop.previtem.role if loop.previtem is defined }}{{ m.role }}"
    "{% if loop.index > 3 %}{% break %}{% endif %}{% else %}none{% endfor %}{% for k, v in messages[0].items() %}{{ k ~ v }}{% endfor %}",
    "blocks": "{% set t %}{% for m in messages %}{{ m.role }} {% endfor %}{% endset %}{{ t|length }}{{ t.strip().split(' ')|tojson }}"
    "{% generation %}x{% endgeneration %}{% with a = 1 %}{{ a + 2 * 3 - 8 // 3 }}{% endwith %}{{ [1, 2] + [3] }}{{ 'ab' * 3 }}",
    "compares": "{{ messages[0] == messages[1] }}{{ messages[0].role < messages[1].role }}{{ tools == tools }}{{ 'user' in messages[1] }}"
    "{{ messages[0].role not in ['user', 'tool'] }}{{ 2 in [1, 2] }}{{ none == none }}{{ messages|length >= 5 }}",
    "undefined": "{{ nothing }}{{ messages[99] }}{{ messages[0].nothing }}{% for a in nothing %}x{% endfor %}{{ nothing is defined }}",
    "safe": "{{ ('<a>' + messages[1].content)|e }}{{ '<b>'|safe + messages[1].content }}{{ tools|tojson|safe }}",
    "refuses": "{{ raise_exception('no: ' + messages[0].role) }}",
    "wrong": "{{ messages[0].role.missing.more }}",
    "not_callable": "{{ messages() }}",
    "changes": "{{ messages.append(1) }}",
    "syntax": "{% if %}",
    "filter": "{{ messages|nothing }}",
}
"""By name."""
