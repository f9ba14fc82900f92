"""Chat templates in this process: an environment in which every operation pays before it is done.

A template is a program from a model's authors. Here it has so much to spend that a hostile one ends within some
hundredths of a second and some megabytes; `NeedsProcess` then says that it is to be rendered in a process of its own.
The prices are bounds: of work in units of about 0.2 µs, and of text, which costs a unit for each 8 characters touched.

What has no price here is not done: nodes, filters, tests, functions and methods that are on no list. Nothing is
evaluated while a template is compiled, because Jinja does not evaluate what takes the context, as all of these do.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Generator, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import BuiltinMethodType, GeneratorType, MethodType
from typing import Any

import jinja2
import jinja2.sandbox
from jinja2 import nodes
from jinja2.meta import find_undeclared_variables
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.utils import _PassArg, pass_context  # pyright: ignore[reportPrivateUsage]
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

FUEL = 120_000
"""Units of one rendering."""
MOST_SOURCE = 65_536
"""Characters of a template; those of published models have up to 30,000."""
MOST_NODES = 10_000
MOST_DEPTH = 60
"""Of nodes inside each other: parsers and compilers are recursive."""
_DATA = 8
"""Characters that cost a unit."""
_WRITTEN = 12
"""Characters that one character of a value may become as JSON or in Python's notation."""
_ESCAPED = 6
"""The same for a text that is joined with markup."""
_MEASURED = 3
"""Units of an element of a value that is measured."""
_MOST_PATH = 8
"""Names in the path of an attribute, each of which is looked up for each element."""
_STATIC = 40
"""Units of a look-up that runs no code of an object."""
_BITS = 4096
"""Of the numbers that are multiplied."""


class NeedsProcess(Exception):
    """The template can't be rendered in this process: it costs too much, or does what has no price."""


class Exhausted(NeedsProcess):
    """The rendering costs too much."""


@dataclass(slots=True)
class Meter:
    """The work and memory that a rendering may still use."""

    fuel: int = FUEL
    macros: dict[str, int] = field(default_factory=dict[str, int])
    """The price of a call of each macro."""

    def charge(self, units: int) -> None:
        self.fuel -= units
        if self.fuel < 0:
            raise Exhausted("it takes more work than is done in this process")

    def charge_text(self, characters: int) -> None:
        self.charge(1 + characters // _DATA)

    def charge_value(self, value: Any, per_character: int = _WRITTEN) -> int:
        """For `per_character` of each character of a value as JSON; returns its depth."""
        size, depth = self.measure(value)
        self.charge_text(size * per_character)
        return depth

    def measure(self, value: Any) -> tuple[int, int]:
        """Characters of a value as JSON, nearly, and its depth. Pays for each element."""
        if isinstance(value, str):
            return len(value), 0
        if not isinstance(value, (dict, list, tuple)):
            return _atom(value), 0
        size = 2
        depth = 0
        level = [value]
        while level:  # by levels, so that no depth is too much
            self.charge(_MEASURED * len(level))
            depth += 1
            below: list[Any] = []
            for container in level:
                elements: list[Any] = (
                    [*container, *container.values()] if isinstance(container, dict) else list(container)
                )
                self.charge(_MEASURED * len(elements))
                for element in elements:
                    if isinstance(element, str):
                        size += len(element) + 4
                    elif isinstance(element, (dict, list, tuple)):
                        size += 4
                        below.append(element)
                    else:
                        size += _atom(element) + 4
            level = below
        return size, depth


def _atom(value: Any) -> int:
    """Characters of a value that has no parts. Raises NeedsProcess for one that may have hidden ones."""
    if isinstance(value, int):
        return 8 + value.bit_length() // 3
    if isinstance(value, (float, Undefined)) or value is None:
        return 24
    raise NeedsProcess(f"it uses a {type(value).__name__} as a value")


def size_of(context: dict[str, Any]) -> int:
    """About the characters of what a template is given."""
    try:
        return Meter(sys.maxsize).measure(context)[0]
    except NeedsProcess:
        return sys.maxsize


_meter: ContextVar[Meter] = ContextVar("meter")


@dataclass(frozen=True, slots=True)
class Metered:
    """A template that is rendered in this process."""

    template: jinja2.Template
    macros: dict[str, int]
    variables: frozenset[str]
    """Those that it reads."""

    def render(self, context: dict[str, Any], fuel: int = FUEL) -> str:
        """Raises NeedsProcess, and whatever the template raises."""
        token = _meter.set(Meter(fuel, self.macros))
        try:
            return self.template.render(context)
        except RecursionError as error:  # the metered operations use more of the stack than the plain ones
            raise NeedsProcess("its macros are nested too deeply for this process") from error
        finally:
            _meter.reset(token)


def metered(source: str, environment: MeteredEnvironment) -> Metered:
    """Compile a template. Raises NeedsProcess, and jinja2.TemplateError for a source that is no template."""
    if len(source) > MOST_SOURCE:
        raise NeedsProcess(f"it has {len(source)} characters")
    try:
        tree = environment.parse(source)
        _check(tree)
        variables = _variables(tree)
        macros = _macro_prices(tree)
        tree = _priced(tree)
        code = environment.compile(tree, "<template>", "<template>")
    except (RecursionError, MemoryError, SyntaxError, ValueError) as error:
        # SyntaxError and ValueError are Python's: too many nested blocks, or digits of a number.
        raise NeedsProcess("it is too deeply nested") from error
    template = environment.template_class.from_code(environment, code, environment.make_globals(None))
    return Metered(template, macros, variables)


def _variables(tree: nodes.Template) -> frozenset[str]:
    try:
        return frozenset(find_undeclared_variables(tree))
    except jinja2.TemplateError:  # the compiler says it better
        return frozenset()


_NODES: tuple[type[nodes.Node], ...] = (
    *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.If, nodes.For, nodes.Break, nodes.Continue),
    *(nodes.Assign, nodes.AssignBlock, nodes.Macro, nodes.With, nodes.Scope),
    *(nodes.Name, nodes.NSRef, nodes.Const, nodes.Tuple, nodes.List, nodes.Dict, nodes.Pair, nodes.Keyword),
    *(nodes.CondExpr, nodes.Filter, nodes.Test, nodes.Call, nodes.Getitem, nodes.Getattr, nodes.Slice),
    *(nodes.Concat, nodes.Compare, nodes.Operand, nodes.Not, nodes.Neg, nodes.Pos, nodes.And, nodes.Or),
    *(nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod, nodes.Pow),
)


def _check(tree: nodes.Template) -> None:
    """Raises NeedsProcess for nodes that have no price, too many, or too deep ones."""
    number = 0
    level = [tree]
    depth = 0
    below: list[nodes.Node]
    while level:
        depth += 1
        number += len(level)
        if depth > MOST_DEPTH or number > MOST_NODES:
            raise NeedsProcess("it is too large, or too deeply nested")
        below = []
        for node in level:
            if type(node) not in _NODES or (isinstance(node, nodes.For) and node.recursive):
                raise NeedsProcess(f"it has a {type(node).__name__.lower()}")
            if isinstance(node, nodes.Compare) and len(node.ops) != 1:
                raise NeedsProcess("it has a chained comparison")
            if isinstance(node, (nodes.Filter, nodes.Test, nodes.Call)) and (node.dyn_args or node.dyn_kwargs):
                raise NeedsProcess("it unpacks arguments")
            below += node.iter_child_nodes()
        level = below  # type: ignore[assignment]


def _macro_prices(tree: nodes.Template) -> dict[str, int]:
    prices: dict[str, int] = {}
    for macro in tree.find_all(nodes.Macro):
        prices[macro.name] = prices.get(macro.name, 0) + _price(macro.iter_child_nodes())
    return prices


def _price(body: Iterable[nodes.Node]) -> int:
    """Of one execution of statements, without the bodies of loops inside, which pay for themselves."""
    price = 1
    for node in body:
        if isinstance(node, nodes.TemplateData):
            price += len(node.data) // _DATA
        price += 1 + _price(node.iter_child_nodes(exclude=("body",) if isinstance(node, nodes.For) else None))
    return price


def _priced(tree: nodes.Template) -> nodes.Template:
    """The tree with filters that charge in place of loops, slices, comparisons and concatenations."""
    return _Pricing().visit(tree)


class _Pricing(NodeTransformer):
    def visit_For(self, node: nodes.For) -> nodes.For:
        price = _price(node.body) + (_price([node.test]) if node.test is not None else 0)
        self.generic_visit(node)
        node.iter = _filter(node.iter, _LOOP, nodes.Const(price))
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        bounds = [bound or nodes.Const(None) for bound in (node.arg.start, node.arg.stop, node.arg.step)]
        return _filter(node.node, _SLICE, *bounds)

    def visit_Pair(self, node: nodes.Pair) -> nodes.Pair:
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = _filter(node.key, _KEY)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        first, *others = node.nodes
        return _filter(first, _CONCAT, *others)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Expr:
        self.generic_visit(node)
        [operand] = node.ops
        if operand.op in ("eq", "ne") and (isinstance(node.expr, nodes.Const) or isinstance(operand.expr, nodes.Const)):
            return node  # a text that has another length is another text
        return _filter(node.expr, _COMPARE, nodes.Const(operand.op), operand.expr)


def _filter(value: nodes.Node, name: str, *args: nodes.Expr) -> nodes.Filter:
    assert isinstance(value, nodes.Expr) and value.environment is not None
    made = nodes.Filter(value, name, list(args), [], None, None)
    made.set_lineno(value.lineno)
    made.set_environment(value.environment)
    return made


# Names that no source can write.
_LOOP = " loop"
_SLICE = " slice"
_KEY = " key"
_CONCAT = " concat"
_COMPARE = " compare"


class MeteredEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The operations of `like`, with their prices. Renderings set `_meter`."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self, like: jinja2.sandbox.ImmutableSandboxedEnvironment) -> None:
        super().__init__(
            trim_blocks=like.trim_blocks,
            lstrip_blocks=like.lstrip_blocks,
            extensions=[type(extension) for extension in like.extensions.values()],
            optimized=False,
            finalize=_finalize,
        )
        self.globals.update(like.globals)
        self._functions = {id(like.globals[name]): price for name, price in _FUNCTIONS.items()}
        for name, function in like.filters.items():
            self.filters[name] = _with_price(function, _FILTERS.get(name), lazy=name in _LAZY)
        for name, function in like.tests.items():
            self.tests[name] = _with_price(function, _TESTS.get(name))
        self.filters |= {_LOOP: _loop, _SLICE: _slice, _KEY: _key, _CONCAT: _concat, _COMPARE: _compare}

    def getitem(self, obj: Any, argument: Any) -> Any:
        if not isinstance(argument, (str, int)):
            # It is hashed, or written into an error, where a value is a tree: a part counts as often as it is reached.
            _meter.get().charge_value(argument)
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _pay(_BINARY[operator], _meter.get(), left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """As the base class's, whose signature leaves all names to the template's arguments."""
        __self._pay_for_call(_meter.get(), __obj, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def _pay_for_call(self, meter: Meter, called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        meter.charge(2)
        if isinstance(called, Macro):
            meter.charge(meter.macros[called.name])
            return
        if isinstance(called, (BuiltinMethodType, MethodType)):
            owner = called.__self__
            name = called.__name__
            price = next((prices.get(name) for kind, prices in _METHODS if isinstance(owner, kind)), None)
            if price is None:
                raise NeedsProcess(f"it calls '{name}'")
            _pay(price, meter, owner, *args, **{key: value for key, value in kwargs.items() if not key.startswith("_")})
            return
        price = self._functions.get(id(called))
        if price is not None:
            _pay(price, meter, *args)  # what is given by name are elements, which are not touched
        elif callable(called) and not isinstance(called, Undefined):
            raise NeedsProcess(f"it calls {getattr(called, '__name__', type(called).__name__)!r}")


@pass_context
def _finalize(context: Context, value: Any) -> Any:
    meter = _meter.get()
    if isinstance(value, str):
        meter.charge_text(len(value))
    else:
        meter.charge_value(value)
    return value


Price = Callable[..., Any]
"""Charges for an operation; takes the meter and its arguments. May return another form of the first argument."""


def _pay(price: Price, meter: Meter, *args: Any, **kwargs: Any) -> Any:
    try:
        return price(meter, *args, **kwargs)
    except (TypeError, ValueError, AttributeError) as error:  # arguments that the price does not know, or wrong ones
        raise NeedsProcess("it uses an operation in a way that has no price") from error


def _with_price(function: Callable[..., Any], price: Price | None, lazy: bool = False) -> Callable[..., Any]:
    """A filter or test that charges; one without a price raises NeedsProcess. `lazy`: its result is a generator."""
    argument = _PassArg.from_obj(function)

    @pass_context
    def charged(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        meter = _meter.get()
        if price is None:
            raise NeedsProcess(f"it uses '{function.__name__}'")
        meter.charge(1)
        value = _pay(price, meter, value, *args, **kwargs) or value
        if argument is _PassArg.context:
            result = function(context, value, *args, **kwargs)
        elif argument is _PassArg.eval_context:
            result = function(context.eval_ctx, value, *args, **kwargs)
        elif argument is _PassArg.environment:
            result = function(context.environment, value, *args, **kwargs)
        else:
            result = function(value, *args, **kwargs)
        return _ticking(meter, result, 1) if lazy else result

    return charged


def _ticking(meter: Meter, values: Iterable[Any], price: int) -> Generator[Any]:
    for value in values:
        meter.charge(price)
        yield value


# What the tree's filters do.


@pass_context
def _loop(context: Context, values: Any, price: int) -> Any:
    """The values of a loop, each of which costs `price`."""
    meter = _meter.get()
    try:
        number = len(values)
    except TypeError:
        return _ticking(meter, values, price)
    meter.charge(1 + number * price)
    return values


@pass_context
def _slice(context: Context, value: Any, start: Any, stop: Any, step: Any) -> Any:
    bounds = slice(start, stop, step)
    if isinstance(value, (str, list, tuple)):
        length = len(range(*bounds.indices(len(value))))  # type: ignore[arg-type]
        _meter.get().charge_text(length * (1 if isinstance(value, str) else _DATA))
    elif not isinstance(value, (Undefined, dict)):
        raise NeedsProcess(f"it cuts a {type(value).__name__}")
    return value[bounds]


@pass_context
def _key(context: Context, value: Any) -> Any:
    """The key of an element, which is hashed."""
    _hash(_meter.get(), value)
    return value


@pass_context
def _concat(context: Context, *values: Any) -> str:
    meter = _meter.get()
    for value in values:
        if isinstance(value, str):
            meter.charge_text(len(value))
        else:
            meter.charge_value(value)
    return "".join(map(str, values))


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
    "in": lambda item, values: item in values,
    "notin": lambda item, values: item not in values,
}


@pass_context
def _compare(context: Context, left: Any, name: str, right: Any) -> Any:
    meter = _meter.get()
    if name in ("in", "notin"):
        _contains(meter, right, left)
    else:
        _equals(meter, left, right)
    return _OPERATORS[name](left, right)


# Prices. Each takes the meter and the arguments of the operation, and may raise NeedsProcess.


def _equals(meter: Meter, left: Any, right: Any) -> None:
    if isinstance(left, str) or isinstance(right, str):
        meter.charge_text(min(len(left), len(right)) // 4 if isinstance(left, str) and isinstance(right, str) else 1)
    else:
        meter.charge_value(left, 1)
        meter.charge_value(right, 1)


def _contains(meter: Meter, values: Any, item: Any) -> None:
    if isinstance(values, str):
        _search(meter, values, item)
    elif isinstance(values, (list, tuple)) and not isinstance(item, (list, tuple, dict)):
        meter.charge(len(values) * (1 + (len(item) // 32 if isinstance(item, str) else 0)))
    elif isinstance(values, dict):
        _hash(meter, item)
    elif isinstance(values, range):
        meter.charge(len(values))
    else:
        meter.charge_value(item, 1)
        meter.charge_value(values, 1)


def _in(meter: Meter, item: Any, values: Any) -> None:
    _contains(meter, values, item)


def _search(meter: Meter, text: Any, part: Any = None, *others: Any) -> None:
    """For a part in a text: Python's search may compare a part of up to some hundred characters at each place."""
    length = min(len(part), 256) if isinstance(part, str) else 1
    meter.charge_text(len(text) * (1 + length // 8))


def _hash(meter: Meter, key: Any) -> None:
    if isinstance(key, str):
        meter.charge_text(len(key))
    else:
        meter.charge_value(key, 1)


def _free(meter: Meter, *args: Any, **kwargs: Any) -> None:
    """Takes as long for any value."""


def _attr(meter: Meter, value: Any, name: Any) -> None:
    meter.charge(_STATIC)


def _strip(meter: Meter, value: Any, characters: Any = None) -> None:
    length = len(characters) if isinstance(characters, str) else 0
    meter.charge_text(length)
    if isinstance(value, str):
        meter.charge_text(len(value) * (1 + length // 4))
    else:
        meter.charge_value(value)


def _text(meter: Meter, value: Any) -> None:
    if isinstance(value, str):
        meter.charge_text(4 * len(value))
    else:
        meter.charge_value(value)


def _escape(meter: Meter, value: Any) -> None:
    meter.charge_value(value, _WRITTEN * _ESCAPED)


def _list(meter: Meter, value: Any = ()) -> Any:
    if isinstance(value, GeneratorType):
        return _values(value)  # type: ignore[reportUnknownArgumentType]
    meter.charge(_length_of(value))
    return None


def _reverse(meter: Meter, value: Any) -> None:
    if isinstance(value, GeneratorType):
        raise NeedsProcess("it reverses a generator")
    meter.charge(_length_of(value))


def _length_of(value: Any) -> int:
    length = operator.length_hint(value, -1)
    if length < 0:
        raise NeedsProcess("it lists what has no length")
    return length


def _values(values: Generator[Any]) -> list[Any]:
    """All generators here are `_ticking`, so that each value was paid for."""
    return list(values)


def _items(meter: Meter, value: Any) -> None:
    """Pays while it is consumed."""


def _map(meter: Meter, value: Any, *args: Any, attribute: Any = None, **kwargs: Any) -> None:
    _named(args)
    _path(meter, value, attribute)


def _select(meter: Meter, value: Any, *args: Any) -> None:
    """For what is looked at; those that are rejected don't come out."""
    _named(args)
    _path(meter, value)


def _select_by(meter: Meter, value: Any, attribute: Any, *args: Any) -> None:
    _named(args)
    _path(meter, value, attribute)


def _named(args: tuple[Any, ...]) -> None:
    """Of the arguments of a filter or test the first is its name."""
    if args and not isinstance(args[0], str):
        raise NeedsProcess(f"it uses a {type(args[0]).__name__} as a name")


def _path(meter: Meter, values: Any, attribute: Any = None) -> None:
    """For an attribute of each element. A generator's elements were paid for."""
    names = 1
    if isinstance(attribute, str):
        meter.charge_text(len(attribute))
        names += attribute.count(".") + attribute.count(",")
    if names > _MOST_PATH:
        raise NeedsProcess(f"it has an attribute of {names} names")
    meter.charge(names * operator.length_hint(values, 0))


def _sort(meter: Meter, value: Any, *args: Any, **kwargs: Any) -> Any:
    value = _values(value) if isinstance(value, GeneratorType) else value  # type: ignore[reportUnknownArgumentType]
    for argument in (*args, *kwargs.values()):
        _path(meter, value, argument)
    size, _ = meter.measure(value)
    meter.charge_text(size * 8 * (1 + size.bit_length()))
    return value


def _join(meter: Meter, value: Any, separator: Any = "", attribute: Any = None) -> Any:
    value = _values(value) if isinstance(value, GeneratorType) else value  # type: ignore[reportUnknownArgumentType]
    if isinstance(value, (list, tuple, str, dict)):
        _path(meter, value, attribute)
        _text_of_all(meter, value)
        meter.charge_text(len(value) * _length(separator))  # type: ignore[reportUnknownArgumentType]
    else:
        meter.charge_value(value)
    return value  # type: ignore[reportUnknownVariableType]


def _text_of_all(meter: Meter, values: Any) -> None:
    markup = _ESCAPED if any(isinstance(element, Markup) for element in values) else 1
    for element in values:
        if isinstance(element, str):
            meter.charge_text(markup * len(element))
        else:
            meter.charge_value(element)


def _length(value: Any) -> int:
    if not isinstance(value, str):
        raise NeedsProcess(f"it uses a {type(value).__name__} as a text")
    return len(value) * (_ESCAPED if isinstance(value, Markup) else 1)


def _replace(meter: Meter, value: Any, old: Any, new: Any, count: Any = None) -> None:
    _search(meter, value, old)
    if not isinstance(value, str) or not isinstance(old, str):
        raise NeedsProcess("it replaces parts of what is no text")
    number = value.count(old)
    markup = any(isinstance(text, Markup) for text in (value, old, new))
    meter.charge_text((len(value) + number * _length(new)) * (_ESCAPED if markup else 1))


def _indent(meter: Meter, value: Any, width: Any = 4, first: Any = False, blank: Any = False) -> None:
    length = width if isinstance(width, int) else _length(width)
    meter.charge_text(2 * _length(value))
    meter.charge_text((len(value.splitlines()) + 2) * max(0, length) * 2)


def _tojson(
    meter: Meter,
    value: Any,
    ensure_ascii: Any = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: Any = False,
) -> None:
    width = len(indent) if isinstance(indent, str) else max(0, indent or 0)
    marks = sum(map(_length, separators)) if separators else 2
    size, depth = meter.measure(value)
    meter.charge_text(size * (_WRITTEN + width * depth + marks + (size.bit_length() if sort_keys else 0)))


def _default(meter: Meter, value: Any, *args: Any, **kwargs: Any) -> None:
    """Returns one of its arguments."""


def _number(meter: Meter, value: Any) -> None:
    """`abs`, `int`, `float` and `round` without arguments. Python refuses texts of more than 4,300 digits."""
    if isinstance(value, str):
        meter.charge_text(len(value))
    elif isinstance(value, int):
        meter.charge(1 + value.bit_length() // 64)


def _integer_test(meter: Meter, value: Any, *args: Any) -> None:
    """They are written with `%`, which formats a text."""
    if not isinstance(value, (int, float)):
        raise NeedsProcess(f"it divides a {type(value).__name__}")
    _arithmetic(meter, value, *args)


_FILTERS: dict[str, Price] = {
    **dict.fromkeys(("length", "count", "first", "last"), _free),
    "attr": _attr,
    **dict.fromkeys(("default", "d"), _default),
    **dict.fromkeys(("upper", "lower", "capitalize", "title", "string", "safe"), _text),
    **dict.fromkeys(("escape", "e", "forceescape"), _escape),
    "list": _list,
    "reverse": _reverse,
    "items": _items,
    "map": _map,
    **dict.fromkeys(("select", "reject"), _select),
    **dict.fromkeys(("selectattr", "rejectattr"), _select_by),
    **dict.fromkeys(("sort", "dictsort", "unique", "min", "max"), _sort),
    **dict.fromkeys(("abs", "int", "float", "round"), _number),
    "trim": _strip,
    "join": _join,
    "replace": _replace,
    "indent": _indent,
    "tojson": _tojson,
}
_LAZY = ("items", "map", "select", "reject", "selectattr", "rejectattr", "unique")

_TESTS: dict[str, Price] = {
    **dict.fromkeys(("defined", "undefined", "none", "true", "false", "boolean", "integer", "float", "number"), _free),
    **dict.fromkeys(("string", "mapping", "iterable", "sequence", "callable", "sameas"), _free),
    **dict.fromkeys(("filter", "test"), _text),
    **dict.fromkeys(("upper", "lower"), _text),
    **dict.fromkeys(("eq", "==", "equalto", "ne", "!=", "lt", "<", "lessthan", "le", "<="), _equals),
    **dict.fromkeys(("gt", ">", "greaterthan", "ge", ">="), _equals),
    **dict.fromkeys(("odd", "even", "divisibleby"), _integer_test),
    "in": _in,
}


def _split(meter: Meter, text: str, separator: Any = None, maxsplit: int = -1) -> None:
    _search(meter, text, separator)
    meter.charge(text.count(separator) if separator else len(text) // 2)


def _lines(meter: Meter, text: str, *args: Any) -> None:
    meter.charge(1 + len(text))


def _affix(meter: Meter, text: str, affixes: Any, *places: Any) -> None:
    for affix in affixes if isinstance(affixes, tuple) else (affixes,):  # type: ignore[misc]
        meter.charge_text(_length(affix))
    meter.charge_text(len(text) // 4)


def _join_method(meter: Meter, separator: str, values: Any) -> None:
    if not isinstance(values, (list, tuple, dict, str)):
        raise NeedsProcess("it joins what has no length")
    _text_of_all(meter, values)
    meter.charge_text(len(values) * _length(separator) * (_ESCAPED if isinstance(separator, Markup) else 1))


def _whole(meter: Meter, value: Any, *args: Any) -> None:
    meter.charge_value(value, 1)
    for argument in args:
        meter.charge_value(argument, 1)


def _get(meter: Meter, mapping: Any, key: Any, default: Any = None) -> None:
    _hash(meter, key)


def _bare(meter: Meter, text: str) -> None:
    meter.charge_text(4 * len(text))


_METHODS: tuple[tuple[type, dict[str, Price]], ...] = (
    (
        str,
        {
            **dict.fromkeys(("strip", "lstrip", "rstrip"), _strip),
            **dict.fromkeys(("split", "rsplit"), _split),
            **dict.fromkeys(("find", "rfind", "index", "rindex", "count", "partition", "rpartition"), _search),
            **dict.fromkeys(("startswith", "endswith", "removeprefix", "removesuffix"), _affix),
            **dict.fromkeys(("upper", "lower", "title", "capitalize", "swapcase", "casefold"), _bare),
            **dict.fromkeys(("isdigit", "isalpha", "isalnum", "isspace", "isnumeric", "isupper", "islower"), _bare),
            "splitlines": _lines,
            "replace": _replace,
            "join": _join_method,
        },
    ),
    (
        dict,
        {**dict.fromkeys(("items", "keys", "values"), _free), "get": _get},
    ),
    (list, {"count": _whole, "index": _whole}),
    (LoopContext, {"cycle": _free}),
)


def _time(meter: Meter, pattern: Any) -> None:
    meter.charge_text(_length(pattern))
    if len(pattern) > 200 or any(character.isdigit() for character in pattern):  # a width, which the C library may obey
        raise NeedsProcess("its pattern of a time has no price")


def _copy(meter: Meter, *args: Any) -> None:
    for argument in args:
        if isinstance(argument, dict):
            meter.charge(len(argument))  # type: ignore[reportUnknownArgumentType]
        else:
            meter.charge_value(argument, 1)


_FUNCTIONS: dict[str, Callable[..., None]] = {
    "range": _free,
    **dict.fromkeys(("namespace", "dict"), _copy),
    "raise_exception": _text,
    "strftime_now": _time,
}


def _arithmetic(meter: Meter, left: Any, right: Any = 1) -> None:
    for operand in (left, right):
        if isinstance(operand, int) and operand.bit_length() <= _BITS:
            meter.charge(1 + operand.bit_length() // 64)
        elif not isinstance(operand, (float, Undefined)):
            raise NeedsProcess(f"it calculates with a {type(operand).__name__}")


def _add(meter: Meter, left: Any, right: Any) -> None:
    if isinstance(left, str) and isinstance(right, str):
        markup = isinstance(left, Markup) or isinstance(right, Markup)
        meter.charge_text((len(left) + len(right)) * (_ESCAPED if markup else 1))
    elif isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        meter.charge(len(left) + len(right))
    elif not isinstance(left, str) and not isinstance(right, str):
        _arithmetic(meter, left, right)


def _multiply(meter: Meter, left: Any, right: Any) -> None:
    for text, times in ((left, right), (right, left)):
        if isinstance(text, (str, list, tuple)):
            meter.charge(1 + len(text) * max(0, times if isinstance(times, int) else 0))
            return
    _arithmetic(meter, left, right)


def _power(meter: Meter, left: Any, right: Any) -> None:
    _arithmetic(meter, left, right)
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * max(0, right) > _BITS:
        raise NeedsProcess("it makes a large number")


_BINARY: dict[str, Callable[[Meter, Any, Any], None]] = {
    "+": _add,
    "*": _multiply,
    "**": _power,
    **dict.fromkeys(("-", "/", "//", "%"), _arithmetic),
}
