package locksql_test

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"go/ast"
	"go/format"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

var mutate = flag.Bool("mutate", false, "run TestMutants, which takes a quarter of an hour")

// TestMutants breaks the package in every small way it knows and checks that a test notices: each condition forced to
// true and to false, each operand of && and || and each case taken away, each assignment and call left out.
//
// All mutants are compiled into one test binary, where an environment variable chooses one. What no test notices must be
// in testdata/survivors.txt with the reason why nothing could.
//
//	go test ./internal/locksql -run TestMutants -mutate -timeout 2h -v
func TestMutants(t *testing.T) {
	if !*mutate {
		t.Skip("-mutate is not set")
	}
	dir := t.TempDir()
	mutants := instrument(t, dir)
	binary := filepath.Join(dir, "mutants.test")
	build := exec.Command("go", "test", "-c", "-o", binary, "-overlay", filepath.Join(dir, "overlay.json"), ".")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	// The quick tests first: most mutants end there.
	type phase struct {
		flag, tests string
		timeout     time.Duration
	}
	phases := []phase{
		{"-test.skip", "Hostile|Cache|Footprint|Corpus|Mutants", 5 * time.Second},
		{"-test.run", "Hostile|Cache|Footprint", time.Minute},
		{"-test.run", "Corpus", time.Minute},
	}
	passes := func(id int, p phase) bool {
		ctx, cancel := context.WithTimeout(context.Background(), p.timeout)
		defer cancel()
		cmd := exec.CommandContext(ctx, "sh", "-c", `ulimit -v 4000000; exec "$0" "$@"`, binary, p.flag, p.tests, "-test.short", "-test.failfast")
		cmd.Env = append(os.Environ(), "PGADVLOCK_MUTANT="+strconv.Itoa(id))
		out, err := cmd.CombinedOutput()
		if err != nil && id == 0 {
			t.Fatalf("the tests fail without a mutant: %v\n%s", err, out)
		}
		return err == nil
	}
	survives := func(id int) bool {
		for _, p := range phases {
			if !passes(id, p) {
				return false
			}
		}
		return true
	}
	survives(0)
	known := survivors(t)
	seen := map[string]bool{}
	survived := 0
	for i, m := range mutants {
		if i%100 == 0 {
			t.Logf("%d of %d", i, len(mutants))
		}
		if !survives(i + 1) {
			continue
		}
		survived++
		seen[m.String()] = true
		if !known[m.String()] {
			t.Errorf("no test notices: %s (%s)", m, m.pos)
		}
	}
	for m := range known {
		if !seen[m] {
			t.Errorf("in survivors.txt, but a test notices: %s", m)
		}
	}
	t.Logf("%d mutants, %d survived", len(mutants), survived)
}

// survivors reads testdata/survivors.txt: a line a mutant, reasons on lines that begin with #.
func survivors(t *testing.T) map[string]bool {
	text, err := os.ReadFile("testdata/survivors.txt")
	if err != nil {
		t.Fatal(err)
	}
	known := map[string]bool{}
	for line := range strings.Lines(string(text)) {
		if line = strings.TrimSpace(line); line != "" && line[0] != '#' {
			known[line] = true
		}
	}
	return known
}

// mutant is one change.
type mutant struct {
	pos      token.Position
	function string
	change   string
}

func (m mutant) String() string { return m.function + ": " + m.change }

// instrument writes the package's files with all mutants in them to dir, and the overlay that puts them in place.
func instrument(t *testing.T, dir string) []mutant {
	overlay := map[string]string{}
	w := &instrumenter{fset: token.NewFileSet()}
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(w.fset, name, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range file.Decls {
			if f, ok := d.(*ast.FuncDecl); ok {
				w.function = f.Name.Name
				w.block(f.Body)
			}
		}
		var out bytes.Buffer
		if err := format.Node(&out, w.fset, file); err != nil {
			t.Fatal(err)
		}
		write(t, dir, name, out.Bytes(), overlay)
	}
	write(t, dir, "mutant.go", []byte(`package locksql

import (
	"os"
	"strconv"
)

var theMutant, _ = strconv.Atoi(os.Getenv("PGADVLOCK_MUTANT"))

func isMutant(n int) bool { return n == theMutant }
`), overlay)
	text, err := json.Marshal(map[string]any{"Replace": overlay})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "overlay.json"), text, 0o600); err != nil {
		t.Fatal(err)
	}
	return w.mutants
}

func write(t *testing.T, dir, name string, text []byte, overlay map[string]string) {
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	abs, err := filepath.Abs(name)
	if err != nil {
		t.Fatal(err)
	}
	overlay[abs] = path
}

type instrumenter struct {
	fset     *token.FileSet
	function string
	mutants  []mutant
}

// add notes a mutant and returns the expression that is true in it.
func (w *instrumenter) add(n ast.Node, change string) ast.Expr {
	var text bytes.Buffer
	format.Node(&text, w.fset, n)
	line := strings.Join(strings.Fields(text.String()), " ")
	if len(line) > 100 {
		line = line[:100] + "..."
	}
	m := mutant{w.fset.Position(n.Pos()), w.function, strings.ReplaceAll(change, "%", line)}
	for i := 2; slices.ContainsFunc(w.mutants, func(o mutant) bool { return o.String() == m.String() }); i++ {
		m.change = strings.ReplaceAll(change, "%", line) + " #" + strconv.Itoa(i)
	}
	w.mutants = append(w.mutants, m)
	return &ast.CallExpr{Fun: ast.NewIdent("isMutant"), Args: []ast.Expr{&ast.BasicLit{Kind: token.INT, Value: strconv.Itoa(len(w.mutants))}}}
}

func or(x, y ast.Expr) ast.Expr {
	return &ast.ParenExpr{X: &ast.BinaryExpr{X: x, Op: token.LOR, Y: y}}
}

func andNot(x, y ast.Expr) ast.Expr {
	return &ast.ParenExpr{X: &ast.BinaryExpr{X: &ast.UnaryExpr{Op: token.NOT, X: x}, Op: token.LAND, Y: &ast.ParenExpr{X: y}}}
}

// condition forces a whole condition, and takes away the operands in it.
func (w *instrumenter) condition(e ast.Expr, both bool) ast.Expr {
	no := w.add(e, "% is never so")
	var yes ast.Expr
	if both {
		yes = w.add(e, "% is always so")
	}
	e = andNot(no, w.operands(e))
	if both {
		e = or(yes, e)
	}
	return e
}

// operands takes away each operand of && and ||.
func (w *instrumenter) operands(e ast.Expr) ast.Expr {
	switch e := e.(type) {
	case *ast.ParenExpr:
		return &ast.ParenExpr{X: w.operands(e.X)}
	case *ast.UnaryExpr:
		return &ast.UnaryExpr{Op: e.Op, X: w.operands(e.X)}
	case *ast.BinaryExpr:
		if e.Op != token.LAND && e.Op != token.LOR {
			return e
		}
		sides := [2]ast.Expr{e.X, e.Y}
		for i, side := range sides {
			without := w.add(e, "% without "+[2]string{"left", "right"}[i]+" side")
			side = &ast.ParenExpr{X: w.operands(side)}
			if e.Op == token.LAND {
				sides[i] = or(without, side)
			} else {
				sides[i] = andNot(without, side)
			}
		}
		return &ast.ParenExpr{X: &ast.BinaryExpr{X: sides[0], Op: e.Op, Y: sides[1]}}
	}
	return e
}

// block instruments the statements of a block.
func (w *instrumenter) block(b *ast.BlockStmt) {
	if b != nil {
		b.List = w.statements(b.List)
	}
}

func (w *instrumenter) statements(list []ast.Stmt) []ast.Stmt {
	for i, s := range list {
		list[i] = w.statement(s)
	}
	return list
}

func (w *instrumenter) statement(s ast.Stmt) ast.Stmt {
	switch s := s.(type) {
	case *ast.BlockStmt:
		w.block(s)
	case *ast.IfStmt:
		s.Cond = w.condition(s.Cond, true)
		w.block(s.Body)
		if s.Else != nil {
			s.Else = w.statement(s.Else)
		}
	case *ast.ForStmt:
		if s.Cond != nil {
			s.Cond = w.condition(s.Cond, false)
		}
		w.block(s.Body)
	case *ast.RangeStmt:
		w.block(s.Body)
	case *ast.SwitchStmt:
		for _, c := range s.Body.List {
			c := c.(*ast.CaseClause)
			for i, e := range c.List {
				if s.Tag == nil {
					c.List[i] = w.condition(e, false)
				} else { // tags are without side effects here
					c.List[i] = andNot(w.add(e, "no case %"), &ast.BinaryExpr{X: s.Tag, Op: token.EQL, Y: e})
				}
			}
			c.Body = w.statements(c.Body)
		}
		s.Tag = nil
	case *ast.TypeSwitchStmt:
		for _, c := range s.Body.List {
			c := c.(*ast.CaseClause)
			c.Body = w.statements(c.Body)
		}
	case *ast.ReturnStmt:
		for i, e := range s.Results {
			s.Results[i] = w.operands(e)
		}
	case *ast.AssignStmt:
		if s.Tok == token.DEFINE {
			break
		}
		without := w.optional(s)
		for i, e := range s.Rhs {
			s.Rhs[i] = w.operands(e)
		}
		return without
	case *ast.IncDecStmt, *ast.ExprStmt:
		return w.optional(s)
	}
	return s
}

// optional leaves a statement out.
func (w *instrumenter) optional(s ast.Stmt) ast.Stmt {
	cond := &ast.UnaryExpr{Op: token.NOT, X: w.add(s, "without %")}
	return &ast.IfStmt{Cond: cond, Body: &ast.BlockStmt{List: []ast.Stmt{s}}}
}
