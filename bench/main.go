// Command bench measures what pgadvlock costs, beside the pgx driver that it
// wraps and beside its peers, on real servers that it starts itself.
//
//	go build && ./bench -short          # under a minute
//	./bench -md ../BENCHMARKS.md -plots ../docs
//	./bench -run '^lock, unlock' -cpuprofile lock.prof
//
// It prints the bars of the project, and ends with 0 when none is missed, 1 when
// one is, 2 when something went wrong, and 3 when one was not measured: the floor,
// raced against itself, was not its own equal.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"regexp"
	"runtime/pprof"
	"strings"
	"time"

	"github.com/pgadvlock/pgadvlock/internal/pgtest"
)

func main() {
	b := &bench{loadBefore: loadAverage()}
	flag.BoolVar(&b.short, "short", false, "less of everything: under a minute")
	only := flag.String("run", "", "only the races whose names match the regular expression")
	markdown := flag.String("md", "", "write the figures to this file")
	plots := flag.String("plots", "", "write the curves to this directory")
	profile := flag.String("cpuprofile", "", "write a CPU profile to this file; samples have the label who")
	flag.Parse()
	if flag.NArg() > 0 {
		flag.Usage()
		os.Exit(2)
	}
	code, err := b.main(*only, *markdown, *plots, *profile)
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		code = 2
	}
	os.Exit(code)
}

// bench is one run of the program.
type bench struct {
	short      bool
	only       *regexp.Regexp
	server     *server
	loadBefore string

	answers []answer
	tables  []*table
	curves  []curve
	notes   []string
}

// server is PostgreSQL with a database to measure in.
type server struct {
	*pgtest.Server
	db          string
	socket, tcp string // DSNs
}

func startServer() (*server, error) {
	s, err := pgtest.Start()
	if err != nil {
		return nil, err
	}
	const db = "bench"
	if err := errors.Join(s.CreateDB(db), s.Exec(db, serverSchema)); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return &server{s, db, s.SocketDSN(db), s.DSN(db)}, nil
}

func (b *bench) main(only, markdown, plots, profile string) (code int, err error) {
	if b.only, err = regexp.Compile(only); err != nil {
		return 0, err
	}
	if b.server, err = startServer(); err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, b.server.Close()) }()
	if profile != "" {
		f, err := os.Create(profile)
		if err != nil {
			return 0, err
		}
		defer f.Close()
		if err := pprof.StartCPUProfile(f); err != nil {
			return 0, err
		}
		defer pprof.StopCPUProfile()
	}
	began := time.Now()
	if err := b.measure(); err != nil {
		return 0, err
	}
	fmt.Fprintf(os.Stderr, "bench: %s in all\n", time.Since(began).Round(time.Second))
	printBars(os.Stdout, b.answers)
	for _, n := range b.notes {
		fmt.Println(n)
	}
	if markdown != "" {
		var text strings.Builder
		b.write(&text)
		if err := os.WriteFile(markdown, []byte(text.String()), 0o644); err != nil {
			return 0, err
		}
	}
	if plots != "" {
		for _, c := range b.curves {
			if err := c.save(plots); err != nil {
				return 0, err
			}
		}
	}
	return exitCode(b.answers), nil
}

func exitCode(answers []answer) int {
	code := 0
	for _, a := range answers {
		switch {
		case a.verdict == missed:
			return 1
		case a.verdict == notMeasured:
			code = 3
		}
	}
	return code
}

// measure asks all questions. Those about nanoseconds come first: nothing of the
// others' is in memory then.
func (b *bench) measure() (err error) {
	defer func() {
		p := recover()
		if f, ok := p.(failure); ok {
			err = f.error
		} else if p != nil {
			panic(p)
		}
	}()
	for _, ask := range []func(*bench){runFake, runFakeLocks, runPrefilter, runReturn, runGrowth} {
		ask(b)
	}
	sleep, err := keepAwake()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, sleep()) }()
	for _, ask := range []func(*bench){runServer, runLocks, runDirty, runFirst, runPQ, runLoad} {
		ask(b)
	}
	return nil
}

// wanted reports whether the race was asked for.
func (b *bench) wanted(name string) bool { return b.only.MatchString(name) }

// spend is how long a race of each kind lasts, all sittings together.
var spend = map[string]struct{ full, short time.Duration }{
	"fake":   {3 * time.Second, 400 * time.Millisecond},
	"growth": {3 * time.Second, 300 * time.Millisecond},
	"server": {15 * time.Second, 1200 * time.Millisecond},
	"locks":  {10 * time.Second, 1200 * time.Millisecond},
	"lib/pq": {5 * time.Second, 500 * time.Millisecond},
	"load":   {12 * time.Second, 1200 * time.Millisecond},
}

const (
	fullSittings  = 6
	shortSittings = 3
)

// race runs a race of that kind, if it was asked for.
func (b *bench) race(kind, name string, e effort, open func(*ground) []contestant) (r result, ok bool) {
	if !b.wanted(name) {
		return r, false
	}
	defer func(began time.Time) {
		fmt.Fprintf(os.Stderr, "bench: %s: %.1fs\n", name, time.Since(began).Seconds())
	}(time.Now())
	total := spend[kind].full
	e.sittings = fullSittings
	if b.short {
		total, e.sittings = spend[kind].short, shortSittings
	}
	if e.heavy {
		e.sittings = 2
	}
	e.sitting = total / time.Duration(e.sittings)
	return raceFairly(e, open), true
}

func (b *bench) judge(a answer) { b.answers = append(b.answers, a) }
func (b *bench) note(s string)  { b.notes = append(b.notes, s) }
func (b *bench) curve(c curve) {
	for _, s := range c.series {
		if len(s.points) == 0 {
			return
		}
	}
	b.curves = append(b.curves, c)
}

func (b *bench) table(title, caption string) *table {
	t := &table{title: title, caption: caption, cells: map[[2]string]string{}}
	b.tables = append(b.tables, t)
	return t
}
