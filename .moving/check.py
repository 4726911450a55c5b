import ast,subprocess,sys,collections
from pathlib import Path
files=[f for f in subprocess.run(["git","ls-files","-co","--exclude-standard"],capture_output=True,text=True).stdout.split() if f.endswith(".py") and Path(f).exists()]
mods={}
for f in files:
    m=f[:-3].replace("/","."); m=m.removesuffix(".__init__"); mods[m]=f
rooms={m.split(".")[0] for m in mods}
pk={m for m in mods}
bad=0; edges=collections.defaultdict(set)
for m,f in mods.items():
    tree=ast.parse(Path(f).read_text())
    for n in ast.walk(tree):
        if isinstance(n,ast.ImportFrom) and n.module and n.module.split(".")[0] in rooms and n.level==0:
            if n.module.startswith("baton.v1"): continue
            if n.module not in mods:
                print("BAD",f,n.lineno,n.module); bad+=1; continue
            isinit=mods[n.module].endswith("__init__.py")
            names=None
            for a in n.names:
                full=f"{n.module}.{a.name}"
                if full in mods: edges[m].add(full)
                else:
                    edges[m].add(n.module)
                    if names is None:
                        t=ast.parse(Path(mods[n.module]).read_text())
                        names=set()
                        for x in ast.walk(t):
                            if isinstance(x,(ast.FunctionDef,ast.AsyncFunctionDef,ast.ClassDef)): names.add(x.name)
                            elif isinstance(x,ast.Name) and isinstance(x.ctx,ast.Store): names.add(x.id)
                            elif isinstance(x,ast.ImportFrom): names|={y.asname or y.name for y in x.names}
                            elif isinstance(x,ast.Import): names|={(y.asname or y.name).split(".")[0] for y in x.names}
                    if a.name not in names and a.name!="*": print("NONAME",f,n.lineno,full); bad+=1
        elif isinstance(n,ast.Import):
            for a in n.names:
                if a.name.split(".")[0] in rooms and a.name not in mods and not a.name.startswith("baton.v1"): print("BAD",f,n.lineno,a.name); bad+=1
                elif a.name in mods: edges[m].add(a.name)
print(bad,"bad")
# folder graph circles
def folder(m):
    f=mods[m]; return str(Path(f).parent)
g=collections.defaultdict(lambda: collections.defaultdict(list))
for m,es in edges.items():
    if m.startswith("tests"): continue
    for e in es:
        a,b=folder(m),folder(e)
        if a!=b and not b.startswith(a+"/") or a!=b: g[a][b].append((m,e))
# SCC
sys.setrecursionlimit(10000)
idx={};low={};st=[];on=set();res=[];c=[0]
def dfs(v):
    idx[v]=low[v]=c[0];c[0]+=1;st.append(v);on.add(v)
    for w in list(g[v]):
        if w not in idx: dfs(w); low[v]=min(low[v],low[w])
        elif w in on: low[v]=min(low[v],idx[w])
    if low[v]==idx[v]:
        s=[]
        while True:
            w=st.pop();on.discard(w);s.append(w)
            if w==v:break
        if len(s)>1:res.append(s)
for v in list(g):
    if v not in idx:dfs(v)
for s in res:
    print("CIRCLE",sorted(s))
    ss=set(s)
    pairs=[(len(g[a][b]),a,b) for a in s for b in g[a] if b in ss]
    for n,a,b in sorted(pairs): print("   ",n,a,"->",b, [f"{x.rsplit('.',1)[1]}>{y.rsplit('.',1)[1]}" for x,y in g[a][b]][:6])
cnt=collections.Counter(str(Path(f).parent) for f in files if not f.endswith("__init__.py") and not f.startswith("tests"))
print([ (k,v) for k,v in cnt.most_common(25) if v>12])
