"""What Metal forbids and a C++ compiler lets pass, looked for in the text of kernels."""

import re
from collections.abc import Callable, Iterator, Mapping

from metal_emulation import AXES, compile_shader, kernels_of

MOST_BUFFERS = 31
MOST_THREADGROUP_BYTES = 32768

_WORDS = {
    "double": "Metal has no double",
    "auto": "name the type: an address space belongs to it",
    "static": "Metal has no static variables in functions",
    "virtual": "Metal has no virtual functions",
    "throw": "Metal has no exceptions",
    "try": "Metal has no exceptions",
    "new": "Metal has no heap",
    "delete": "Metal has no heap",
    "goto": "Metal has no goto",
    "dynamic_cast": "Metal has no type information",
    "std": "Metal has no std",
    "operator": "Metal kernels here need no operators of their own",
    "asm": "Metal has no assembler",
    "long": "write ulong or int",
}
_SPACES = r"(?:device|threadgroup|constant|thread)"


def complaints(source: str) -> list[str]:
    """What is wrong with a source, a line for each; none: nothing is."""
    text = without_comments(source)
    return [f"{rule.__name__.strip('_')}: {found}" for rule in _RULES for found in rule(text)]


def without_comments(source: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", source, flags=re.S)


def functions_of(text: str) -> Mapping[str, str]:
    """The bodies of all functions by name."""
    found = {}
    for match in re.finditer(r"^[\w:<>*& ]*?\b(\w+)\(([^;{}]*)\)\s*\{", text, re.M):
        depth, at = 0, match.end() - 1
        for at in range(match.end() - 1, len(text)):
            depth += (text[at] == "{") - (text[at] == "}")
            if not depth:
                break
        found[match[1]] = text[match.end() : at]
    return found


def words(text: str) -> Iterator[str]:
    for word, why in _WORDS.items():
        if re.search(rf"\b{word}\b", text):
            yield f"{word}: {why}"


def literals(text: str) -> Iterator[str]:
    """Without f a number is a float in Metal, and a double where the source runs as C++."""
    for found in re.findall(r"(?<![\w.])(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][+-]?\d+)?(?![\w.])", text):
        yield f"{found}: expected an f behind it"


def recursion(text: str) -> Iterator[str]:
    bodies = functions_of(text)
    calls = {name: {other for other in bodies if re.search(rf"\b{other}\s*\(", body)} for name, body in bodies.items()}
    for name in bodies:
        reached, before = calls[name], set[str]()
        while reached != before:
            before = reached
            reached = reached | {each for other in reached for each in calls[other]}
        if name in reached:
            yield f"{name} calls itself"


def buffers(text: str) -> Iterator[str]:
    """torch binds arguments to 0, 1, .. in order."""
    for kernel in kernels_of(text):
        indices = [argument.buffer for argument in kernel.arguments if argument.buffer is not None]
        if indices != [*range(len(indices))]:
            yield f"{kernel.name}: buffers {indices}, expected 0, 1, .. in order"
        if len(indices) > MOST_BUFFERS:
            yield f"{kernel.name}: {len(indices)} buffers, expected at most {MOST_BUFFERS}"


def places(text: str) -> Iterator[str]:
    """Metal wants all positions and sizes of a kernel in as many axes."""
    for kernel in kernels_of(text):
        types = {argument.type for argument in kernel.arguments if argument.attribute in AXES}
        if len(types) > 1:
            yield f"{kernel.name}: places as {', '.join(sorted(types))}, expected one type"


def threadgroup_variables(text: str) -> Iterator[str]:
    """They stand in kernels alone, not in what kernels call."""
    inside = sum(len(kernel.memory) for kernel in kernels_of(text))
    declared = len(re.findall(r"\bthreadgroup \w+ \w+(?:\[[^\]]*\])?;", text))
    if declared != inside:
        yield f"{declared} variables in threadgroup memory, {inside} of them first in a line of a kernel"


def threadgroup_bytes(text: str) -> Iterator[str]:
    """As compiled."""
    names = [kernel for kernel in kernels_of(text) if kernel.memory]
    if not names:
        return
    library = compile_shader(text)
    for kernel in names:
        size = getattr(library, kernel.name).static_thread_group_memory_length
        if size > MOST_THREADGROUP_BYTES:
            yield f"{kernel.name}: {size} bytes of threadgroup memory, expected at most {MOST_THREADGROUP_BYTES}"


def address_spaces(text: str) -> Iterator[str]:
    """Every pointer and every reference names one; C++ takes it for granted."""
    types = {"uchar", "ushort", "uint", "ulong", "int", "float", "half", "bool", "char", "short"}
    types |= set(re.findall(r"\bstruct (\w+)", text))
    name = rf"\b(?:{'|'.join(types)})\d? ?[*&](?![&=]) ?(?:const\b)? *(?:\w+ *[,;)=\[:]|\))"
    for found in re.finditer(name, text):
        if not re.search(rf"\b{_SPACES}\s+(?:const\s+)?$", text[: found.start()]):
            yield f"{found[0]} names no address space"


def includes(text: str) -> Iterator[str]:
    """torch compiles a string, which has no folder."""
    for found in re.findall(r"^\s*#\s*include\s*(.*?)\s*$", text, re.M):
        if found != "<metal_stdlib>":
            yield f"{found}: expected metal_stdlib alone"


def atomics(text: str) -> Iterator[str]:
    for found in re.findall(r"\batomic\w*", text):
        yield f"{found}: what is added atomically has no order"


_RULES: tuple[Callable[[str], Iterator[str]], ...] = (
    words,
    literals,
    recursion,
    buffers,
    places,
    threadgroup_variables,
    threadgroup_bytes,
    address_spaces,
    includes,
    atomics,
)
