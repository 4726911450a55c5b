"""python mv.py MOVES.csv: git mv each old,new and rewrite imports, strings and paths."""
import ast, csv, re, subprocess, sys
from pathlib import Path

def module(path):
    p = path[:-3] if path.endswith(".py") else path
    p = p.removesuffix("/__init__")
    return p.replace("/", ".")

moves = [(a.strip(), b.strip()) for a, b in csv.reader(open(sys.argv[1])) if a.strip() and not a.startswith("#")]
files = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.split("\n")
files = [f for f in files if f]
fileset = set(files)
filemap = {}
for a, b in moves:
    if a in fileset:
        filemap[a] = b
    else:
        hit = [f for f in files if f.startswith(a.rstrip("/") + "/")]
        if not hit:
            sys.exit(f"no such path: {a}")
        for f in hit:
            filemap.setdefault(f, b.rstrip("/") + f[len(a.rstrip("/")):])
modmap = {module(a): module(b) for a, b in filemap.items() if a.endswith(".py")}
# packages which move as a whole
for a, b in moves:
    if a not in fileset:
        modmap[module(a.rstrip("/"))] = module(b.rstrip("/"))
ROOMS = sorted({m.split(".")[0] for m in modmap})
allmods = {module(f) for f in files if f.endswith(".py")}
allmods |= {m.rsplit(".", n)[0] for m in allmods for n in range(1, m.count(".") + 1)}

def new_name(dotted):
    """Longest module prefix that moves."""
    parts = dotted.split(".")
    for n in range(len(parts), 0, -1):
        head = ".".join(parts[:n])
        if head in modmap:
            return ".".join([modmap[head], *parts[n:]])
        if head in allmods and n == len(parts):
            return dotted
        if head in allmods:
            return dotted
    return dotted

STRING = re.compile(r"(?<![\w./-])(" + "|".join(map(re.escape, sorted(modmap, key=len, reverse=True))) + r")(?![\w-])(?!/)")
PATHS = re.compile(r"(?<![\w.-])(" + "|".join(map(re.escape, sorted([*filemap, *[a.rstrip('/') for a, _ in moves if a not in fileset]], key=len, reverse=True))) + r")(?![\w-])(?!\.\w)") if filemap else None
PATHMAP = dict(filemap) | {a.rstrip("/"): b.rstrip("/") for a, b in moves if a not in fileset}

def text_subst(text, dotted=True):
    text = PATHS.sub(lambda m: PATHMAP[m.group(1)], text)
    if dotted:
        text = STRING.sub(lambda m: modmap[m.group(1)], text)
    return text

def rewrite_python(source, name):
    tree = ast.parse(source)
    lines = source.split("\n")
    blines = [l.encode() for l in lines]
    edits = []  # (line, col, endline, endcol, text) byte offsets
    dotted_roots = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            groups = {}
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if full in allmods or full in modmap:
                    target = modmap.get(full, None) or new_name(full)
                    parent, leaf = target.rsplit(".", 1)
                    keep = alias.asname or (alias.name if leaf != alias.name else None)
                    groups.setdefault(parent, []).append(leaf + (f" as {keep}" if keep else ""))
                else:
                    groups.setdefault(new_name(node.module), []).append(alias.name + (f" as {alias.asname}" if alias.asname else ""))
            if list(groups) == [node.module] and all(" as " not in n or n in [f"{a.name} as {a.asname}" for a in node.names] for n in groups[node.module]):
                continue
            if len(groups) == 1 and [n.split(" as ")[0] for n in next(iter(groups.values()))] == [a.name for a in node.names]:
                # only the module's name changes: keep formatting and comments
                line = blines[node.lineno - 1]
                start = line.index(b"from", node.col_offset) + 4
                at = line.index(node.module.encode(), start)
                edits.append((node.lineno, at, node.lineno, at + len(node.module), next(iter(groups))))
                continue
            indent = " " * node.col_offset
            comment = ""
            tail = blines[node.end_lineno - 1][node.end_col_offset:].decode()
            out = []
            for parent, names in groups.items():
                out.append(f"from {parent} import {', '.join(names)}")
            sep = f"{tail}\n{indent}" if "#" in tail else f"\n{indent}"
            edits.append((node.lineno, node.col_offset, node.end_lineno, node.end_col_offset, sep.join(out)))
        elif isinstance(node, ast.Import):
            changed = False
            names = []
            for alias in node.names:
                target = new_name(alias.name)
                if target != alias.name:
                    changed = True
                    if alias.asname is None:
                        dotted_roots.add(alias.name)
                names.append(target + (f" as {alias.asname}" if alias.asname else ""))
            if changed:
                edits.append((node.lineno, node.col_offset, node.end_lineno, node.end_col_offset, "import " + ", ".join(names)))
    # dotted uses after `import a.b.c`
    if dotted_roots:
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                text = ast.get_source_segment(source, node)
                if text in dotted_roots:
                    edits.append((node.lineno, node.col_offset, node.end_lineno, node.end_col_offset, new_name(text)))
    # strings and comments
    import io, tokenize
    for tok in tokenize.generate_tokens(io.StringIO(source).readline):
        if tok.type in (tokenize.STRING, tokenize.COMMENT) or tokenize.tok_name[tok.type].startswith("FSTRING_MIDDLE"):
            new = text_subst(tok.string)
            if new != tok.string:
                (l, c), (el, ec) = tok.start, tok.end
                c = len(lines[l - 1][:c].encode()); ec = len(lines[el - 1][:ec].encode())
                edits.append((l, c, el, ec, new))
    if not edits:
        return source
    data = "\n".join(lines).encode()
    starts = [0]
    for l in blines:
        starts.append(starts[-1] + len(l) + 1)
    spans = sorted({(starts[l - 1] + c, starts[el - 1] + ec, t) for l, c, el, ec, t in edits}, reverse=True)
    last = len(data) + 1
    for a, b, t in spans:
        if b > last:
            print("overlap", name, data[a:b]); continue
        data = data[:a] + t.encode() + data[b:]
        last = a
    return data.decode()

SKIP = ("baton/v1/", "CHANGELOG.md", "tools/moves.csv", "uv.lock")
changed = []
for f in files:
    p = Path(f)
    if any(f.startswith(s) or f == s for s in SKIP) or not p.is_file():
        continue
    if f.endswith(".py"):
        s = p.read_text()
        n = rewrite_python(s, f)
    else:
        try:
            s = p.read_text()
        except UnicodeDecodeError:
            continue
        n = text_subst(s, dotted=f.endswith((".toml", ".md", ".yaml", ".yml", "Makefile", "Dockerfile", ".sh", ".cfg", "run", ".json", ".tpl", ".j2", ".ini", ".service")) )
    if f in filemap and f.endswith(".py"):
        d = filemap[f].count("/") - f.count("/")
        if d:
            n = re.sub(r"(__file__\)(?:\.resolve\(\))?\.parents\[)(\d+)(\])", lambda m: m[1] + str(int(m[2]) + d) + m[3], n)
            for line in n.splitlines():
                if "__file__" in line and "parents[" not in line: print("look:", filemap[f], line.strip())
    if n != s:
        p.write_text(n); changed.append(f)
for a, b in filemap.items():
    Path(b).parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["git", "mv", a, b], check=True)
# packages need __init__.py where siblings have them
for b in filemap.values():
    d = Path(b).parent
    while d != Path("."):
        if (d / "__init__.py").exists() is False and b.endswith(".py"):
            (d / "__init__.py").write_text("")
            subprocess.run(["git", "add", str(d / "__init__.py")], check=True)
        d = d.parent
print(len(filemap), "moved,", len(changed), "rewritten")
