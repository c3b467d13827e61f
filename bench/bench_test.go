package main

import (
	"database/sql/driver"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pgadvlock/pgadvlock/internal/pgtest"
)

// takes makes a run that claims to take so many nanoseconds a piece, give or take
// some per cent, and now and then much more, as when another program runs.
func takes(r *rand.Rand, nanos float64) func(n int) time.Duration {
	return func(n int) time.Duration {
		t := nanos * (1 + 0.05*r.NormFloat64())
		if r.IntN(20) == 0 {
			t *= 10
		}
		return time.Duration(t * float64(n))
	}
}

func planted(nanos ...float64) func(*ground) []contestant {
	return func(*ground) []contestant {
		r := rand.New(rand.NewPCG(3, 4))
		var cs []contestant
		for _, n := range nanos {
			cs = append(cs, contestant{"", takes(r, n)})
		}
		return cs
	}
}

var quick = effort{sittings: 3, sitting: 10 * time.Millisecond, block: time.Microsecond}

func TestRaceFindsPlantedDifference(t *testing.T) {
	r := raceFairly(quick, planted(1000, 1000, 1030))
	if !r.fair() || r.twice {
		t.Error("the floor was found to differ from itself")
	}
	e := r.ratio(first)
	if !e.contains(1.03) || e.contains(1) || e.hi-e.lo > 0.02 {
		t.Errorf("3 %% more was measured as %v", e)
	}
	if e := r.more(first); !e.contains(30) || e.contains(0) {
		t.Errorf("30 ns more were measured as %v", e)
	}
	for limit, want := range map[float64]verdict{1.01: missed, 1.03: open, 1.05: met} {
		if a := barRatio("", limit, r); a.verdict != want {
			t.Errorf("limit %g: %v, want %v", limit, a.verdict, want)
		}
	}
}

func TestUnfairFloorIsNotMeasured(t *testing.T) {
	opened := 0
	r := raceFairly(quick, func(g *ground) []contestant {
		opened++
		return planted(1000, 1100, 1000)(g)
	})
	if want := 2 * quick.sittings; opened != want || !r.twice {
		t.Errorf("%d sittings, want %d: a race is run again when the floor is not its own equal", opened, want)
	}
	a := barRatio("", 1.5, r)
	if a.verdict != notMeasured || !strings.Contains(a.floor, "second try") {
		t.Errorf("verdict %v, floor %q", a.verdict, a.floor)
	}
}

func TestVerdicts(t *testing.T) {
	for _, c := range []struct {
		what       string
		e          estimate
		fair       bool
		blur, room float64
		want       verdict
	}{
		{"below", estimate{1, 0.99, 1.005}, true, 0.001, 0.01, met},
		{"around", estimate{1.01, 1.005, 1.02}, true, 0.001, 0.01, open},
		{"above", estimate{1.03, 1.02, 1.04}, true, 0.001, 0.01, missed},
		{"above, blurred", estimate{1.3, 1.2, 1.4}, true, 0.1, 0.01, missed},
		{"around, blurred", estimate{1, 0.9, 1.1}, true, 0.1, 0.01, notMeasured},
		{"below, unfair", estimate{1, 0.99, 1.005}, false, 0.001, 0.01, notMeasured},
	} {
		if got := judge(c.e, 1.01, c.fair, c.blur, c.room); got != c.want {
			t.Errorf("%s: %v, want %v", c.what, got, c.want)
		}
	}
}

func TestExitCode(t *testing.T) {
	for _, c := range []struct {
		verdicts []verdict
		want     int
	}{
		{nil, 0},
		{[]verdict{met, open}, 0},
		{[]verdict{met, notMeasured}, 3},
		{[]verdict{missed, notMeasured}, 1},
		{[]verdict{notMeasured, missed}, 1},
	} {
		var answers []answer
		for _, v := range c.verdicts {
			answers = append(answers, answer{verdict: v})
		}
		if got := exitCode(answers); got != c.want {
			t.Errorf("%v: exit %d, want %d", c.verdicts, got, c.want)
		}
	}
}

func TestBarCount(t *testing.T) {
	if a := barCount("", 1, 1); a.verdict != met {
		t.Error("1 of at most 1 is", a.verdict)
	}
	if a := barCount("", 1, 2); a.verdict != missed {
		t.Error("2 of at most 1 is", a.verdict)
	}
}

// TestBootstrapCovers: a 95 % interval contains the truth about as often as it
// says, also where sittings differ from each other.
func TestBootstrapCovers(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	const trials = 300
	covered := 0
	for range trials {
		groups := make([][]float64, 8)
		for g := range groups {
			sitting := 1 + 0.01*r.NormFloat64()
			for range 50 {
				groups[g] = append(groups[g], sitting*(1+0.03*r.NormFloat64()))
			}
		}
		if bootstrap(groups, 0.95).contains(1) {
			covered++
		}
	}
	if share := float64(covered) / trials; share < 0.85 {
		t.Errorf("%.0f %% of the intervals contain the truth", 100*share)
	}
}

func TestStatementIsAsLongAsTheBarSays(t *testing.T) {
	if len(statement) != 60 {
		t.Errorf("%d bytes", len(statement))
	}
}

func TestFakeAllocatesNothing(t *testing.T) {
	conn := must1(fakeConnector{}.Connect(ctx)).(*fakeConn)
	if n := testing.AllocsPerRun(100, func() {
		must1(conn.ExecContext(ctx, statement, nil))
		must1(conn.QueryContext(ctx, statement, nil))
		must(must1(conn.BeginTx(ctx, driver.TxOptions{})).Commit())
		must(must1(conn.PrepareContext(ctx, statement)).Close())
	}); n != 0 {
		t.Errorf("%g allocations", n)
	}
}

// TestEntrants: what is compared is what its name says. Each entrant takes a lock
// on a connection that it gives back.
func TestEntrants(t *testing.T) {
	s := pgtest.Shared(t)
	db := s.NewDB(t)
	dsn := s.DSN(db)
	observer := pgtest.Observe(t, dsn)
	var g ground
	defer g.close()
	heldAfter := func(e entrant) bool {
		pool := e.open(&g, stdlib.GetConnector(*must1(pgx.ParseConfig(dsn))))
		defer pool.Close()
		conn := must1(pool.Conn(ctx))
		lock(conn, key)
		if !observer.Held(key) {
			t.Errorf("%s: the lock was not taken", e.name)
		}
		must(conn.Close())
		defer pgtest.Eventually(t, 5*time.Second, e.name+": its lock is gone with its pool", func() bool {
			pool.Close()
			return !observer.Held(key)
		})
		if e.name == "pgxpool DISCARD ALL" { // its hook runs beside
			pgtest.Eventually(t, 5*time.Second, e.name+" released", func() bool { return !observer.Held(key) })
		}
		return observer.Held(key)
	}
	for _, e := range append(middlewares(), plain("pgx")) {
		if !heldAfter(e) {
			t.Errorf("%s: released the lock", e.name)
		}
	}
	for _, e := range append(resetters(dsn, 1), ours("pgadvlock"), oursSampled(), oursBatched()) {
		if heldAfter(e) {
			t.Errorf("%s: kept the lock", e.name)
		}
	}
}

// TestLentConnectionIsPgx: else pgadvlock would be measured as it is around other
// drivers.
func TestLentConnectionIsPgx(t *testing.T) {
	s := pgtest.Shared(t)
	var g ground
	defer g.close()
	db := ours("pgadvlock").open(&g, lend(&g, s.DSN(s.NewDB(t))))
	conn := must1(db.Conn(ctx))
	must(conn.Raw(func(c any) error {
		if c.(interface{ Conn() *pgx.Conn }).Conn() == nil {
			t.Error("pgadvlock does not see pgx")
		}
		return nil
	}))
	must(conn.Close())
	must(db.Close())
}

func TestCurveIsDrawn(t *testing.T) {
	dir := t.TempDir()
	s := series{"a series", []point{{1, estimate{10, 9, 11}}, {10_000, estimate{12, 11, 13}}}}
	for _, logY := range []bool{false, true} {
		c := curve{file: "curve.svg", title: "A title", x: "x", y: "y", logY: logY, series: []series{s}}
		must(c.save(dir))
		svg := string(must1(os.ReadFile(filepath.Join(dir, "curve.svg"))))
		for _, want := range []string{"<svg", "A title", "a series", "10,000"} {
			if !strings.Contains(svg, want) {
				t.Errorf("logY %v: no %q in the plot", logY, want)
			}
		}
	}
}

func TestTableShowsWhatWasNotAsked(t *testing.T) {
	tab := &table{title: "T", caption: "C.", cells: map[[2]string]string{}}
	tab.line("one", map[string]string{"a": "1"}, "a")
	tab.line("two", map[string]string{"b": "2"}, "b")
	var text strings.Builder
	tab.write(&text)
	want := "\n### T\n\nC.\n\n| | a | b |\n|---|---|---|\n| one | 1 | – |\n| two | – | 2 |\n"
	if text.String() != want {
		t.Errorf("got\n%s\nwant\n%s", text.String(), want)
	}
}
