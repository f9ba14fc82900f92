"""Chat templates that want all time or memory; each must end within bounds, in whichever process."""

from __future__ import annotations

DEEP = "{% if x %}" * 500 + "a" + "{% endif %}" * 500
GROWS = "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(64) %}"
NESTS = "{% set ns = namespace(s=['aaaaaaaa']) %}{% for i in range(64) %}"
PAIRS = "{% set ns = namespace(t=(1, 1)) %}{% for i in range(60) %}{% set ns.t = (ns.t, ns.t) %}{% endfor %}"
"""A tree of 60 levels, which is hashed, compared and written as one of 2 ** 60 leaves."""
SILENT = "{% for i in range(3000) %}{% for x in range(1, 99999)|FILTER %}{% endfor %}{% endfor %}"
PATH = "0." * 30_000 + "0"
"""Of a text's first character, again and again."""
HOSTILE = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"
    "{% endfor %}",
    "center": "{{ 'x'|center(9000000000) }}",
    "center_method": "{{ 'x'.center(9000000000) }}",
    "ljust": "{{ 'x'.ljust(9000000000) }}",
    "zfill": "{{ '1'.zfill(9000000000) }}",
    "expandtabs": r"{{ '\t'.expandtabs(2000000000) }}",
    "times": "{{ 'x' * 9000000000 }}",
    "times_item": "{{ [messages[0].content * 9] * 999999999 }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "shift": "{{ (2 ** 4000) * (2 ** 4000) * (2 ** 4000) ** 99999 }}",
    "percent": "{{ '%999999999d' % 1 }}",
    "percent_star": "{{ '%*d' % (999999999, 1) }}",
    "format_filter": "{{ '%999999999d'|format(1) }}",
    "format_method": "{{ '{:>9000000000}'.format('x') }}",
    "format_map": "{{ '{a:>9000000000}'.format_map({'a': 1}) }}",
    "odd": "{{ '%999999999d' is odd }}",
    "odd_select": "{{ ['%999999999d']|select('odd')|list }}",
    "divisible": "{{ '%999999999d' is divisibleby(1) }}",
    "double": GROWS + "{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}",
    "double_tilde": GROWS + "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "double_list": NESTS + "{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}",
    "double_join": GROWS + "{% set ns.s = [ns.s, ns.s]|join %}{% endfor %}",
    "double_join_method": GROWS + "{% set ns.s = ns.s.join('abc') %}{% endfor %}",
    "double_replace": GROWS + "{% set ns.s = ns.s|replace('a', 'aa') %}{% endfor %}",
    "double_replace_method": GROWS + "{% set ns.s = ns.s.replace('', ns.s) %}{% endfor %}",
    "double_block": GROWS + "{% set t %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = t %}{% endfor %}",
    "nested_list": NESTS + "{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s }}",
    "nested_json": NESTS + "{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s|tojson }}",
    "nested_equal": "{% set ns = namespace(s=[1], t=[1]) %}{% for i in range(64) %}{% set ns.s = [ns.s, ns.s] %}"
    "{% set ns.t = [ns.t, ns.t] %}{% endfor %}{{ ns.s == ns.t }}",
    "nested_namespaces": "{% set a = namespace(l=[1]) %}{% set ns = namespace(l=[a, a]) %}{% for i in range(64) %}"
    "{% set ns.l = [namespace(l=ns.l), namespace(l=ns.l)] %}{% endfor %}{{ ns.l }}",
    "escapes": "{% set ns = namespace(s='\"') %}{% for i in range(64) %}{% set ns.s = ''.join([ns.s]) + ''|safe %}"
    "{% set ns.s = [ns.s ~ '']|join %}{% set ns.s = ns.s|e|string ~ ns.s %}{% endfor %}",
    "reprs": r"{% set ns = namespace(s='\\') %}{% for i in range(64) %}{% set ns.s = [ns.s]|string %}{% endfor %}",
    "jsons": r"{% set ns = namespace(s='\\') %}{% for i in range(64) %}{% set ns.s = ns.s|tojson %}{% endfor %}",
    "indent_json": "{{ messages|tojson(indent=900000000) }}",
    "indent": "{{ ('a\n' * 100)|indent(900000000) }}",
    "recursive_macro": "{% macro m(n) %}{{ m(n) }}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "macro_tree": "{% macro a() %}xxxxxxxxxxxxxxxx{% endmacro %}"
    + "".join(
        f"{{% macro {chr(98 + i)}() %}}" + f"{{{{ {chr(97 + i)}() }}}}" * 16 + "{% endmacro %}" for i in range(16)
    )
    + "{{ q() }}",
    "macro_text": "{% macro m(x) %}{% for i in range(90000) %}{{ x }}{% endfor %}{% endmacro %}"
    "{{ m('a' * 100000)|length }}",
    "macro_arguments": "{% macro m(" + ", ".join(f"a{i}=1" for i in range(3000)) + ") %}{% endmacro %}"
    "{% for i in range(9000) %}{{ m() }}{% endfor %}",
    "recursive_loop": "{% for a in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "loop_data": "{% for a in range(99999) %}" + "x" * 60_000 + "{% endfor %}",
    "loop_slices": "{% set t = 'a' * 1000000 %}{% for a in range(99999) %}{% set u = t[1:] %}{% endfor %}",
    "loop_searches": "{% set t = 'a' * 1000000 %}{% for a in range(99999) %}{% set u = 'b' in t %}{% endfor %}",
    "loop_compares": "{% set t = 'a' * 1000000 %}{% set s = t + 'b' %}{% set t = t + 'c' %}{% for a in range(99999) %}"
    "{% set u = s == t %}{% endfor %}",
    "loop_sorts": "{% for a in range(99999) %}{% set u = range(99999)|list|sort %}{% endfor %}",
    "strange_range": "{% for a in range(99999) %}{{ 'x' in range(99999) }}{% endfor %}",
    "lipsum": "{{ lipsum(n=999999) }}",
    "wordwrap": "{{ ('a' * 1000000)|wordwrap(1, wrapstring='b' * 1000000) }}",
    "batch": "{{ [1]|batch(900000000, 'x')|list }}",
    "slice_filter": "{{ [1]|slice(900000000)|list }}",
    "round": "{{ 1.5|round(900000000, 'ceil') }}",
    "sum": "{{ range(99999)|map('string')|map('list')|sum(start=[]) }}",
    "bytes": "{{ (5).to_bytes(9000000000, 'big') }}",
    "call_block": "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + "{% call m() %}" * 40
    + "aaaaaaaa"
    + "{% endcall %}" * 40,
    "cycler": "{% set c = cycler(*range(99999)) %}{% for i in range(99999) %}{{ c.next() ~ c.items }}{% endfor %}",
    "generators": "{% for i in range(90000)|map('string')|map('upper')|map('lower') %}{% for j in range(90000) %}"
    "{{ i }}{% endfor %}{% endfor %}",
    "with": "{% with a = 'x' * 100000 %}{% with b = a * 100000 %}{{ b }}{% endwith %}{% endwith %}",
    "deep": DEEP,
    "deep_expression": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep_list": "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "deep_not": "{{ " + "not " * 50_000 + "1 }}",
    "big": "{{ messages }}" * 200_000,
    "big_number": "{{ " + "9" * 100_000 + " }}",
    "hashed_item": PAIRS + "{{ messages[0][ns.t] }}",
    "hashed_key": PAIRS + "{{ {ns.t: 1}|length }}",
    "hashed_get": PAIRS + "{{ messages[0].get(ns.t) }}",
    "hashed_in": PAIRS + "{{ ns.t in messages[0] }}",
    "hashed_test_in": PAIRS + "{{ [ns.t]|select('in', messages[0])|list }}",
    "hashed_dict": PAIRS + "{{ dict([(ns.t, 1)])|length }}",
    "hashed_filter": PAIRS + "{{ ns.t is filter }}",
    "hashed_test": PAIRS + "{{ ns.t is test }}",
    "hashed_attribute": PAIRS + "{{ messages|map(attribute=ns.t)|list }}",
    "hashed_map": PAIRS + "{{ [1]|map(ns.t)|list }}",
    "hashed_select": PAIRS + "{{ [1]|select(ns.t)|list }}",
    "hashed_select_by": PAIRS + "{{ [{'a': 1}]|selectattr('a', ns.t)|list }}",
    "undefined_name": "{% set ns = namespace(t=[1, 1]) %}{% for i in range(60) %}{% set ns.t = [ns.t, ns.t] %}"
    "{% endfor %}"
    "{{ messages[0][ns.t].x }}",
    **{
        f"path_{name}": "{% set texts = ['x'] * 9000 %}{{ texts|" + filter.replace("PATH", f"'{PATH}'") + " }}"
        for name, filter in {
            "map": "map(attribute=PATH)|list",
            "select": "selectattr(PATH)|list",
            "reject": "rejectattr(PATH)|list",
            "join": "join('', attribute=PATH)",
            "sort": "sort(attribute=PATH)",
            "unique": "unique(attribute=PATH)|list",
            "max": "max(attribute=PATH)",
        }.items()
    },
    **{
        f"silent_{name}": SILENT.replace("FILTER", filter)
        for name, filter in {"reject": "reject", "select": "select('none')", "attribute": "selectattr('x')"}.items()
    },
    "silent_first": "{% set zeros = [0] * 20000 %}{% for i in range(1500) %}{{ zeros|select|first }}{% endfor %}",
    "strip_set": "{% set c = '" + "z" * 60_000 + "' %}{% for i in range(9000) %}{{ ''.strip(c) }}{% endfor %}",
    "time": "{{ strftime_now('%999999999Y') }}",
}
"""By name. Each of them, rendered without bounds, takes more than a second or a gigabyte, or is refused."""
