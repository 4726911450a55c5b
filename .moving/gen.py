"""spec.txt SECTION -> moves.csv lines on stdout; warns about what is missing."""
import sys, subprocess, re, os
section = sys.argv[1]
files = set(subprocess.run(["git","ls-files"],capture_output=True,text=True).stdout.split())
cur=None; out=[]; claimed=set()
for line in open("/tmp/mv/spec.txt"):
    line=line.split("#")[0].strip()
    if not line: continue
    if line.startswith("["): cur=line[1:-1]; continue
    if cur!=section: continue
    head, mods = line.split(":")
    to, frm = [x.strip() for x in head.split("<-")]
    for m in mods.split():
        a,_,b = m.partition("="); b=b or a
        src=f"{frm}/{a}.py"
        if src not in files:
            print("missing", src, file=sys.stderr); continue
        out.append((src,f"{to}/{b}.py"))
        # tests mirror
        for kind in ("unit","integration"):
            t=f"tests/{kind}/{frm}/test_{a}.py"
            if t in files and kind=="unit":
                out.append((t,f"tests/{kind}/{to}/test_{b}.py"))
        # data beside: html pages
        for ext in ("html","lua","json","c"):
            d=f"{frm}/{a}.{ext}"
            if d in files: out.append((d,f"{to}/{b}.{ext}"))
for a,b in out: print(f"{a},{b}")
