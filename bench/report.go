package main

// This file owns the words: the bars and what is said of each, the tables, and
// BENCHMARKS.md. It measures nothing.

import (
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"text/tabwriter"
)

// verdict is what is said of a bar.
type verdict int

const (
	met         verdict = iota // the whole interval is on the right side
	open                       // the bar is within the interval: not missed
	notMeasured                // the floor disagrees with itself, or cannot see as fine as the bar asks
	missed                     // the whole interval is on the wrong side
)

func (v verdict) String() string { return [...]string{"met", "open", "not measured", "missed"}[v] }

// answer is the line of a bar.
type answer struct {
	bar, limit, figure, interval string
	floor                        string // against itself
	peers                        string
	verdict                      verdict
}

// judge says what an interval means for a bar that a figure must not exceed. blur
// is the smallest difference that the floor's own figures could show, room the
// difference that the bar allows.
func judge(e estimate, limit float64, fair bool, blur, room float64) verdict {
	switch {
	case !fair:
		return notMeasured
	case e.lo > limit:
		return missed
	case e.hi <= limit:
		return met
	case blur > room:
		return notMeasured
	}
	return open
}

// barRatio is a bar on the time by the floor's.
func barRatio(bar string, limit float64, r result) answer { return barRatioOf(bar, limit, r, first) }

func barRatioOf(bar string, limit float64, r result, i int) answer {
	e := r.ratio(i)
	a := answer{bar: bar, limit: fmt.Sprintf("≤ %g", limit), figure: fixed(e.mid, 3), interval: e.interval(3), floor: r.itself(r.ratio(again).text(""))}
	a.verdict = judge(e, limit, r.fair(), r.blur(), limit-1)
	a.peers = r.peers(i, result.ratio, "")
	return a
}

// barMore is a bar on the nanoseconds more than the floor.
func barMore(bar string, limit float64, r result) answer {
	e, own := r.more(first), r.more(again)
	a := answer{bar: bar, limit: fmt.Sprintf("≤ %.0f ns", limit), figure: fixed(e.mid, 1) + " ns", interval: e.interval(1), floor: r.itself(own.signed("ns"))}
	a.verdict = judge(e, limit, r.fair(), max(own.hi, -own.lo), limit)
	a.peers = r.peers(first, result.more, "ns")
	return a
}

// barRate is a bar on GB/s of texts of that size.
func barRate(bar string, limit float64, r result, size float64) answer {
	e := inverse(r.time(floor), size)
	a := answer{bar: bar, limit: fmt.Sprintf("≥ %g GB/s", limit), figure: fixed(e.mid, 1) + " GB/s", interval: e.interval(1), floor: r.itself(r.ratio(again).text(""))}
	a.verdict = judge(estimate{-e.mid, -e.hi, -e.lo}, -limit, r.fair(), 0, 1)
	for i := first; i < len(r.names); i++ {
		a.peers = join(a.peers, r.names[i]+" "+fixed(inverse(r.time(i), size).mid, 1)+" GB/s")
	}
	return a
}

// barCount is a bar on what is counted, where nothing is uncertain.
func barCount(bar string, limit, figure float64) answer {
	a := answer{bar: bar, limit: fmt.Sprintf("≤ %g", limit), figure: fmt.Sprintf("%g", figure), interval: "counted"}
	if figure > limit {
		a.verdict = missed
	}
	return a
}

// itself is what the floor's own figure looked like.
func (r result) itself(figure string) string {
	if r.twice {
		figure += ", second try"
	}
	return figure
}

// peers are the figures of the others, without intervals.
func (r result) peers(but int, figure func(result, int) estimate, unit string) (s string) {
	for i := first; i < len(r.names); i++ {
		if i == but {
			continue
		}
		e := figure(r, i)
		if unit == "" {
			s = join(s, r.names[i]+" "+fixed(e.mid, 2))
		} else {
			s = join(s, r.names[i]+" "+fixed(e.mid, 0)+" "+unit)
		}
	}
	return s
}

func join(s, t string) string {
	if s == "" {
		return t
	}
	return s + "; " + t
}

func fixed(x float64, digits int) string { return fmt.Sprintf("%.*f", digits, x) }

func (e estimate) interval(digits int) string {
	return fixed(e.lo, digits) + " to " + fixed(e.hi, digits)
}

// text is the estimate with as many digits as its size asks for.
func (e estimate) text(unit string) string {
	digits := 3
	switch m := math.Abs(e.mid); {
	case m >= 100:
		digits = 0
	case m >= 10:
		digits = 1
	case m >= 3:
		digits = 2
	}
	s := fixed(e.mid, digits)
	if unit != "" {
		s += " " + unit
	}
	return s + " (" + e.interval(digits) + ")"
}

// signed is text of a difference.
func (e estimate) signed(unit string) string {
	return fmt.Sprintf("%+.1f %s (%s)", e.mid, unit, e.interval(1))
}

// duration is nanoseconds in the unit that people read.
func duration(ns float64) string {
	switch {
	case ns >= 1e6:
		return fixed(ns/1e6, 2) + " ms"
	case ns >= 1e3:
		return fixed(ns/1e3, 1) + " µs"
	}
	return fixed(ns, 0) + " ns"
}

func moreCell(r result, i int) string {
	return fmt.Sprintf("%s, %+g allocs", r.more(i).signed("ns"), r.moreAllocs(i))
}

func ratioCell(r result, i int) string { return r.ratio(i).text("") }

// table is one of BENCHMARKS.md: a line for each contestant, a column for each
// question.
type table struct {
	title, caption string
	columns        []string
	names          []string
	cells          map[[2]string]string // by name and column
}

// add adds a column. The first line is the floor's time.
func (t *table) add(column string, r result, cell func(r result, i int) string) {
	t.set(r.names[floor], column, duration(r.time(floor).mid))
	for i := again; i < len(r.names); i++ {
		t.set(r.names[i], column, cell(r, i))
	}
	t.set(r.names[again], column, r.itself(cell(r, again)))
}

// line adds a line.
func (t *table) line(name string, cells map[string]string, order ...string) {
	for _, column := range order {
		t.set(name, column, cells[column])
	}
}

func (t *table) set(name, column, cell string) {
	if !slices.Contains(t.names, name) {
		t.names = append(t.names, name)
	}
	if !slices.Contains(t.columns, column) {
		t.columns = append(t.columns, column)
	}
	t.cells[[2]string{name, column}] = cell
}

func (t *table) write(w io.Writer) {
	fmt.Fprintf(w, "\n### %s\n\n%s\n\n| |", t.title, t.caption)
	for _, c := range t.columns {
		fmt.Fprintf(w, " %s |", c)
	}
	fmt.Fprintf(w, "\n|---|%s\n", strings.Repeat("---|", len(t.columns)))
	for _, name := range t.names {
		fmt.Fprintf(w, "| %s |", name)
		for _, c := range t.columns {
			cell := t.cells[[2]string{name, c}]
			if cell == "" {
				cell = "–"
			}
			fmt.Fprintf(w, " %s |", cell)
		}
		fmt.Fprintln(w)
	}
}

// write writes the plot, and its points.
func (c curve) write(w io.Writer) {
	fmt.Fprintf(w, "\n![%s](docs/%s)\n\n| %s |", c.title, c.file, c.x)
	for _, p := range c.series[0].points {
		fmt.Fprintf(w, " %s |", thousandsOf(p.x))
	}
	fmt.Fprintf(w, "\n|---|%s\n", strings.Repeat("---|", len(c.series[0].points)))
	for _, s := range c.series {
		fmt.Fprintf(w, "| %s: %s |", s.name, c.y)
		for _, p := range s.points {
			fmt.Fprintf(w, " %s |", thousandsOf(math.Round(p.y.mid)))
		}
		fmt.Fprintln(w)
	}
}

// printBars prints the one table on the terminal.
func printBars(w io.Writer, answers []answer) {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "bar\tlimit\tfigure\t95 % interval\tfloor against itself\tverdict\tpeers")
	for _, a := range answers {
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%s\t%s\t%s\n", a.bar, a.limit, a.figure, a.interval, a.floor, a.verdict, a.peers)
	}
	tw.Flush()
}

// write writes BENCHMARKS.md.
func (b *bench) write(w io.Writer) {
	fmt.Fprint(w, "# Benchmarks\n\n`make bench` wrote this. [docs/performance.md](docs/performance.md) says how it is measured, and where the time goes.\n\n")
	for _, line := range b.machine() {
		fmt.Fprintf(w, "- %s\n", line)
	}
	fmt.Fprint(w, "\n## Bars\n\n*met*: the whole interval keeps the bar. *open*: the bar is inside the interval. *missed*: the whole interval\n"+
		"exceeds it. *not measured*: the floor, raced against itself, was not its own equal, or too blurred to tell.\n\n"+
		"| bar | limit | figure | 95 % interval | floor against itself | verdict | peers |\n|---|---|---|---|---|---|---|\n")
	for _, a := range b.answers {
		fmt.Fprintf(w, "| %s | %s | %s | %s | %s | %s | %s |\n", a.bar, a.limit, a.figure, a.interval, a.floor, a.verdict, a.peers)
	}
	fmt.Fprint(w, "\n## Figures\n\nMedians, with their 95 % intervals.\n")
	for _, t := range b.tables {
		if len(t.names) > 0 {
			t.write(w)
		}
	}
	if len(b.curves) > 0 {
		fmt.Fprint(w, "\n## Growth\n")
		for _, c := range b.curves {
			c.write(w)
		}
	}
	if len(b.notes) > 0 {
		fmt.Fprintln(w)
	}
	for _, n := range b.notes {
		fmt.Fprintln(w, n)
	}
}

// machine is what the figures depend on.
func (b *bench) machine() []string {
	v := b.server.Version()
	lines := []string{
		fmt.Sprintf("%s, %d processors, %s/%s, load average %s before and %s after", processor(), runtime.NumCPU(), runtime.GOOS, runtime.GOARCH, b.loadBefore, loadAverage()),
		fmt.Sprintf("%s, PostgreSQL %d.%d, %s", runtime.Version(), v/10000, v%10000, bouncerVersion(b.server)),
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return lines
	}
	var deps []string
	for _, d := range info.Deps {
		switch d.Path {
		case "github.com/jackc/pgx/v5", "github.com/lib/pq", "github.com/ngrok/sqlmw", "github.com/XSAM/otelsql",
			"github.com/uptrace/opentelemetry-go-extra/otelsql", "go.opentelemetry.io/otel/sdk":
			deps = append(deps, strings.TrimPrefix(d.Path, "github.com/")+" "+d.Version)
		}
	}
	return append(lines, strings.Join(deps, ", "))
}

func processor() string {
	if text, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		for line := range strings.Lines(string(text)) {
			if name, value, _ := strings.Cut(line, ":"); strings.TrimSpace(name) == "model name" {
				return strings.TrimSpace(value)
			}
		}
	}
	if out, err := exec.Command("sysctl", "-n", "machdep.cpu.brand_string").Output(); err == nil {
		return strings.TrimSpace(string(out))
	}
	return "unknown processor"
}

func bouncerVersion(s *server) string {
	if !s.HasBouncer() {
		return "no PgBouncer"
	}
	for _, program := range []string{os.Getenv("PGADVLOCK_TEST_PGBOUNCER"), "pgbouncer", "/usr/sbin/pgbouncer", "/usr/local/sbin/pgbouncer"} {
		if out, err := exec.Command(program, "--version").Output(); err == nil {
			version, _, _ := strings.Cut(string(out), "\n")
			return version
		}
	}
	return "PgBouncer of unknown version"
}

// loadAverage is that of the last minute: who else was at work.
func loadAverage() string {
	text, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return "unknown"
	}
	one, _, _ := strings.Cut(string(text), " ")
	return one
}
