// Package software runs other people's software on pgadvlock, each as its
// README says, with nothing but the driver changed. docs/compatibility.md is
// the table of what is tested here.
package software

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pgadvlock/pgadvlock"
	"github.com/pgadvlock/pgadvlock/internal/pgtest"
)

func TestMain(m *testing.M) {
	slog.SetDefault(slog.New(&log))
	os.Exit(m.Run())
}

// log keeps what pgadvlock has to say. The databases here are opened by name,
// often by the software itself, so that the default logger is all there is to
// listen to.
var log logbook

type logbook struct {
	mu      sync.Mutex
	entries []entry
	unsure  bool // whether unproven-pooling is not worth an entry
}

// entry is one report.
type entry struct{ rule, message, caller string }

func (l *logbook) Enabled(context.Context, slog.Level) bool { return true }
func (l *logbook) WithAttrs([]slog.Attr) slog.Handler       { return l }
func (l *logbook) WithGroup(string) slog.Handler            { return l }

func (l *logbook) Handle(_ context.Context, r slog.Record) error {
	e := entry{message: r.Message}
	r.Attrs(func(a slog.Attr) bool {
		switch a.Key {
		case "rule":
			e.rule = a.Value.String()
		case "caller":
			e.caller = a.Value.String()
		}
		return true
	})
	l.mu.Lock()
	defer l.mu.Unlock()
	if (e.rule != "" || r.Level >= slog.LevelWarn) && !(l.unsure && e.rule == string(pgadvlock.RuleUnprovenPooling)) {
		l.entries = append(l.entries, e)
	}
	return nil
}

// doubt sets whether a pool mode that was not found out is left out.
func (l *logbook) doubt(unsure bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.unsure = unsure
}

// take returns what was logged since the last call.
func (l *logbook) take() []entry {
	l.mu.Lock()
	defer l.mu.Unlock()
	entries := l.entries
	l.entries = nil
	return entries
}

// place is a database and the road to it.
type place struct {
	dsn    string
	see    *pgtest.Observer
	unsure bool // the pool mode has to be found out, which a busy machine may be too slow for
}

// everywhere runs the test on PostgreSQL itself and behind PgBouncer in session
// mode, there with the mode found out and with the mode said.
func everywhere(t *testing.T, test func(*testing.T, place)) {
	server := pgtest.Shared(t)
	roads := map[string]func(db string) string{
		"direct":                  server.DSN,
		"PgBouncer, session":      func(db string) string { return server.BouncerDSN(db, "session") },
		"PgBouncer, session, set": func(db string) string { return server.BouncerDSN(db, "session") + "&pgadvlock_pool_mode=session" },
	}
	for name, dsn := range roads {
		t.Run(name, func(t *testing.T) {
			if name != "direct" {
				server.RequireBouncer(t)
			}
			db := server.NewDB(t)
			p := place{dsn: dsn(db), see: pgtest.Observe(t, server.DSN(db)), unsure: name == "PgBouncer, session"}
			log.take()
			log.doubt(p.unsure)
			defer log.doubt(false)
			test(t, p)
			p.nothingHeld(t)
		})
	}
}

// here is a place on PostgreSQL itself.
func here(t *testing.T) place {
	t.Helper()
	server := pgtest.Shared(t)
	dsn := server.DSN(server.NewDB(t))
	log.take()
	return place{dsn: dsn, see: pgtest.Observe(t, dsn)}
}

// behindTransactions is a place behind PgBouncer in transaction mode.
func behindTransactions(t *testing.T) place {
	t.Helper()
	server := pgtest.Shared(t)
	server.RequireBouncer(t)
	db := server.NewDB(t)
	log.take()
	return place{dsn: server.BouncerDSN(db, "transaction"), see: pgtest.Observe(t, server.DSN(db))}
}

func (p place) open(t *testing.T) *sql.DB {
	t.Helper()
	db, err := sql.Open("pgadvlock", p.dsn)
	must(t, err)
	t.Cleanup(func() { db.Close() })
	return db
}

func (p place) nothingHeld(t *testing.T) {
	t.Helper()
	if p.unsure { // if it was not found out, the connection is closed instead, and PgBouncer cleans up
		p.see.WaitFor(5*time.Second, "nothing is held", func(l []pgtest.Lock) bool { return len(l) == 0 })
	}
	if locks := p.see.Locks(); len(locks) > 0 {
		t.Errorf("held: %v", locks)
	}
}

// silent checks that pgadvlock had nothing to say.
func silent(t *testing.T) {
	t.Helper()
	if entries := log.take(); len(entries) > 0 {
		t.Errorf("reported: %+v", entries)
	}
}

// reported checks that exactly one thing was said, and that it names a line of
// a file.
func reported(t *testing.T, rule pgadvlock.Rule, file string) {
	t.Helper()
	entries := log.take()
	if len(entries) != 1 || entries[0].rule != string(rule) || !strings.Contains(entries[0].caller, "/"+file+":") {
		t.Errorf("reported %+v, want %s with a line of %s", entries, rule, file)
	}
}

// refused checks that a call was refused by the rule, names the line that made
// it, and took no lock.
func (p place) refused(t *testing.T, rule pgadvlock.Rule, call func() error) {
	t.Helper()
	before := pc()
	err := call()
	var e *pgadvlock.RuleError
	if !errors.Is(err, rule) || !errors.As(err, &e) {
		t.Errorf("got %v, want %s", err, rule)
		return
	}
	// call is written on the line of the call of refused, or begins on the next.
	at := e.Event.Caller
	if at.File != before.File || at.Line != before.Line && at.Line != before.Line+1 {
		t.Errorf("names %s, want %s:%d", at, before.File, before.Line)
	}
	if !strings.Contains(err.Error(), fmt.Sprintf("%s:%d", at.File, at.Line)) {
		t.Errorf("the message lacks the line: %v", err)
	}
	if entries := log.take(); len(entries) != 1 || entries[0].rule != string(rule) {
		t.Errorf("reported %+v", entries)
	}
	p.nothingHeld(t)
}

// pc is where the caller's caller is.
func pc() runtime.Frame {
	pcs := make([]uintptr, 1)
	runtime.Callers(3, pcs)
	frame, _ := runtime.CallersFrames(pcs).Next()
	return frame
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// leak takes key 42 on a connection and gives the connection back, which
// releases it and reports that line.
func leak(t *testing.T, p place, db *sql.DB) {
	t.Helper()
	conn, err := db.Conn(t.Context())
	must(t, err)
	_, err = conn.ExecContext(t.Context(), "SELECT pg_advisory_lock(42)")
	must(t, err)
	if !p.see.Held(42) {
		t.Error("not held")
	}
	must(t, conn.Close())
	p.nothingHeld(t)
	reported(t, pgadvlock.RuleLeakedSessionLock, "software_test.go")
}

func rules(entries []entry) (names []string) {
	for _, e := range entries {
		names = append(names, e.rule)
	}
	slices.Sort(names)
	return slices.Compact(names)
}
