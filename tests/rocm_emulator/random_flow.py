"""Random C functions whose lanes diverge: nested loops with several exits and several paths back to
their heads, switches that fall through, and jumps forward out of all of these.

clang's AMD back end must restructure such control flow (StructurizeCFG) before a wave can run it.
The text is the same for host and device and has no undefined behaviour: shifts are masked,
everything is initialised, and all loops share one limited supply of iterations.
"""

from __future__ import annotations

from random import Random

COMMON = """
typedef unsigned u32;
typedef unsigned long long u64;
typedef u32 pair __attribute__((ext_vector_type(2)));
#define LOW(x) ((u32)(x))
#define HIGH(x) ((u32)((x) >> 32))
#define BITS(x) __builtin_bit_cast(u32, x)
#define REAL(x) __builtin_bit_cast(float, (x) & 0x7effffffu)
"""
LANE_WORDS = 4  # words of memory for each lane
MAX_LOOP_STEPS = 200  # iterations of all loops of one call
VARIABLES = {
    "u32": ("x", "y", "z", "w"),
    "u64": ("p", "q"),
    "pair": ("v", "r"),
    "float": ("g", "h"),
}


class _Writer:
    """Writes a function of random statements. A jump may leave enclosing loops, or go to a label
    further on.
    """

    def __init__(self, random: Random) -> None:
        self.random = random
        self.labels = 0
        self.heads: list[str] = []  # labels before the enclosing loops
        self.left = random.randint(8, 26)  # number of statements that remain

    def pick(self, *of: str) -> str:
        return self.random.choice(of)

    def word(self, depth: int = 2) -> str:
        """Draws an expression of type u32."""
        if depth == 0 or self.random.random() < 0.3:
            leaf = self.pick("a", "b", *VARIABLES["u32"], "number", "part", "memory", "turns")
            if leaf == "number":
                return f"{self.random.choice((1, 2, 3, 5, 7, 31, 255, 65537, 2654435761))}u"
            if leaf == "part":
                wide, pair, real = self.pick("p", "q"), self.pick("v", "r"), self.pick("g", "h")
                parts = (f"LOW({wide})", f"HIGH({wide})", f"{pair}.x", f"{pair}.y", f"BITS({real})")
                return self.pick(*parts)
            if leaf == "memory":
                return f"mem[{self.random.randrange(LANE_WORDS)}]"
            return leaf
        left, right = self.word(depth - 1), self.word(depth - 1)
        form = self.pick("+", "-", "*", "&", "|", "^", ">>", "<<", "min", "choose")
        if form in ("<<", ">>"):
            return f"({left} {form} ({right} & 31))"
        if form == "min":
            return f"({left} < {right} ? {left} : {right})"
        if form == "choose":
            return f"({self.test(0)} ? {left} : {right})"
        return f"({left} {form} {right})"

    def test(self, depth: int = 1) -> str:
        left, right = self.word(depth), self.word(depth)
        form = self.random.randrange(4)
        if form == 0:
            return f"{left} < {right}"
        if form == 1:
            return f"({left} >> {self.random.randrange(20)} & 3) == {self.random.randrange(4)}"
        if form == 2:
            return f"({left} & {1 << self.random.randrange(8)})"
        return f"({left} ^ {right}) % 5 < {self.random.randint(1, 4)}"

    def assign(self) -> str:
        kind = self.pick("u32", "u32", "u32", "u64", "pair", "float", "memory")
        if kind == "memory":
            place, sign = self.random.randrange(LANE_WORDS), self.pick("=", "+=", "^=")
            return f"mem[{place}] {sign} {self.word()};"
        name = self.pick(*VARIABLES[kind])
        other = self.pick(*VARIABLES[kind])
        if self.random.random() < 0.25:
            return f"{name} = {other};"
        if kind == "u32":
            return f"{name} {self.pick('=', '=', '+=', '^=')} {self.word()};"
        if kind == "float":
            return f"{name} = REAL({self.word(1)});"
        if kind == "u64":
            put = f"((u64){self.word(1)} << 32 | {self.word(0)})"
            return (
                f"{name} = {self.pick(put, f'{other} << 32 | {other} >> 32', f'{other} + {put}')};"
            )
        pair = f"(pair){{{self.word(1)}, {self.word(0)}}}"
        part = f"{name}.{self.pick('x', 'y')} = {self.word(1)};"
        return self.pick(f"{name} = {other}.yx;", f"{name} = {pair};", part)

    def jump(self, loops: int, targets: list[str]) -> str:
        ways = [f"goto {label};" for label in (*targets[-3:], *self.heads[-3:])]
        if loops:
            ways += ["break;", "continue;", "continue;"]
        return self.random.choice(ways)

    def block(self, depth: int, loops: int, targets: list[str]) -> str:
        """Draws some statements. `loops`: the loops around them; `targets`: the labels after
        them.
        """
        lines = []
        for _ in range(self.random.randint(1, 4)):
            if self.left <= 0:
                break
            self.left -= 1
            lines.append(self.statement(depth, loops, targets))
        return "\n".join(lines) or self.assign()

    def statement(self, depth: int, loops: int, targets: list[str]) -> str:
        forms = ["assign"] * 3 + ["jump"] * 2 * bool(loops or targets)
        if depth:
            forms += ["if", "if", "either", "either", "loop", "loop", "switch", "labelled"]
        form = self.random.choice(forms)
        if form == "assign":
            return self.assign()
        if form == "jump":
            return f"if ({self.test()}) {{ {self.assign()} {self.jump(loops, targets)} }}"
        if form == "if":
            return f"if ({self.test()}) {{\n{self.block(depth - 1, loops, targets)}\n}}"
        if form == "either":
            first = self.block(depth - 1, loops, targets)
            then = self.block(depth - 1, loops, targets)
            return f"if ({self.test()}) {{\n{first}\n}} else {{\n{then}\n}}"
        if form == "labelled":
            self.labels += 1
            label = f"past{self.labels}"
            inside = self.block(depth - 1, loops, [*targets, label])
            return f"{{\n{inside}\n}}\n{label}:;"
        if form == "switch":
            return self.switch(depth, loops, targets)
        if self.random.random() < 0.3:
            body = self.block(depth - 1, loops + 1, targets)
            return f"do {{\n{body}\n}} while (turns > 1 && (--turns, {self.test()}));"
        self.labels += 1
        head = f"again{self.labels}"
        self.heads.append(head)
        body = self.block(depth - 1, loops + 1, targets)
        self.heads.pop()
        test = self.pick("1", self.test())
        return f"{head}:\nwhile (turns > 0 && {test}) {{\n--turns;\n{body}\n}}"

    def switch(self, depth: int, loops: int, targets: list[str]) -> str:
        """Draws a switch. In its cases `break` leaves only the switch, so that several paths meet
        after it.
        """
        count = self.random.randint(2, 4)
        parts = []
        for k in range(count):
            last = self.pick(
                "break;",
                "break;",
                "",
                self.jump(loops or 1, targets).replace(
                    "continue", "break" if not loops else "continue"
                ),
            )
            parts.append(f"case {k}:\n{self.block(depth - 1, loops, targets)}\n{last}")
        if self.random.random() < 0.5:
            parts.append(f"default:\n{self.block(depth - 1, loops, targets)}")
        return f"switch ({self.word()} % {count + 1}) {{\n" + "\n".join(parts) + "\n}"


def function(seed: int) -> str:
    """The body of `u32 f(u32 a, u32 b, u32* mem)`. The same seed gives the same body."""
    writer = _Writer(Random(seed))
    lines = [f"u32 turns = {MAX_LOOP_STEPS};"]
    lines.append("u32 x = a ^ 1, y = b + 2, z = a * 3, w = b >> 4;")
    lines.append("u64 p = a, q = (u64)b << 20; pair v = {a, b}, r = {b, 7};")
    lines.append("float g = 0.5f, h = REAL(a);")
    while writer.left > 0:
        lines.append(writer.block(4, 0, []))
    lines.append("u32 all = x + y * 3 + z * 5 + w * 7 + BITS(g) * 9 + BITS(h) * 11;")
    lines.append("return all + LOW(p) + HIGH(p) * 13 + LOW(q) * 17 + HIGH(q) * 19")
    lines.append("    + v.x * 23 + v.y * 29 + r.x * 31 + r.y * 37;")
    return "\n".join(lines)
