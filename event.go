package pgadvlock

// This file owns how a finding leaves the driver: what it is made of, and its
// way to the log, the caller's span and the program's own handler. What counts
// as a finding is decided in rules.go and where the evidence is.

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel/trace"
)

// Event is one finding of a [Rule].
type Event struct {
	Time  time.Time
	Rule  Rule
	Level Level // what the rule was set to: LevelWarn or LevelError
	// Locks are the locks in question. For [RuleUnlockNotHeld] the first is
	// the one that was to be unlocked; those that the connection does hold
	// follow.
	Locks      []Lock
	Caller     Caller   // who sent the statement, or else who took the first lock
	BackendPID uint32   // as [Session].BackendPID
	PoolMode   PoolMode // as [Session].PoolMode
	Err        error    // what went wrong besides, for instance why a release failed; nil when nothing did
}

// RuleError is what a program gets for a statement that a rule at [LevelError]
// refused, or that the server answered in a way that such a rule objects to.
// errors.Is(err, RuleX) tells which rule; the server's own error, if there was
// one, stays reachable as *pgconn.PgError.
type RuleError struct {
	Event Event
	Fix   string // what to write instead
}

// Error names what was refused, why, where, and what to write instead.
func (e *RuleError) Error() string {
	s := "pgadvlock: " + e.Event.sentence()
	if e.Event.Err != nil {
		s += " (" + e.Event.Err.Error() + ")"
	}
	if e.Event.Caller != (Caller{}) {
		s += "; at " + e.Event.Caller.String()
	}
	if e.Fix != "" {
		s += "; instead, " + e.Fix
	}
	return s
}

// Unwrap returns the rule and, if there is one, the error underneath.
func (e *RuleError) Unwrap() []error {
	if e.Event.Err == nil {
		return []error{e.Event.Rule}
	}
	return []error{e.Event.Rule, e.Event.Err}
}

// describe names the lock for people: "exclusive session lock 42 (2 times),
// taken 3s ago at jobs.go:17 (main.run)".
func (l Lock) describe(now time.Time) string {
	if l.Key.String() == "" {
		return "pg_advisory_unlock_all()"
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s lock %s", l.Mode, l.Scope, l.Key)
	if l.Count > 1 {
		fmt.Fprintf(&b, " (%d times)", l.Count)
	}
	if l.Count > 0 && !l.Since.IsZero() {
		b.WriteString(", taken")
		if !now.IsZero() {
			fmt.Fprintf(&b, " %s ago", now.Sub(l.Since).Round(time.Millisecond))
		}
		if l.Caller != (Caller{}) {
			fmt.Fprintf(&b, " at %s", l.Caller)
		}
	}
	return b.String()
}

func describeLocks(locks []Lock, now time.Time) string {
	words := make([]string, len(locks))
	for i, l := range locks {
		words[i] = l.describe(now)
	}
	return strings.Join(words, "; ")
}

// deliver sends the event to all who listen. It may run inside database/sql's
// locks, so nothing here may use the pool, and nothing a handler does may come
// back as a panic. holds are the spans of locks that are to tell of it.
func (c *Connector) deliver(ctx context.Context, e Event, holds []hold) {
	e.Time = time.Now()
	addSpanEvent(trace.SpanFromContext(ctx), e)
	ctx = addHoldEvents(ctx, holds, e)
	if ok, held := c.log.admit(e); ok {
		c.logEvent(ctx, e, held)
	}
	c.metrics.found(ctx, e)
	if c.settings.handler == nil {
		return
	}
	defer func() {
		if p := recover(); p != nil {
			c.logger().LogAttrs(ctx, slog.LevelError, "pgadvlock: the event handler panicked",
				slog.String("rule", string(e.Rule)), slog.Any("panic", p))
			c.metrics.panicked(ctx)
		}
	}()
	c.settings.handler(ctx, e)
}

func (c *Connector) logger() *slog.Logger {
	if c.settings.logger != nil {
		return c.settings.logger
	}
	return slog.Default()
}

func (c *Connector) logEvent(ctx context.Context, e Event, heldBack int) {
	attrs := []slog.Attr{
		slog.String("rule", string(e.Rule)),
		slog.String("caller", e.Caller.String()),
		slog.String("pool_mode", e.PoolMode.String()),
	}
	if len(e.Locks) > 0 {
		l := e.Locks[0]
		attrs = append(attrs, slog.String("key", l.Key.String()), slog.String("mode", l.Mode.String()), slog.Int("count", l.Count))
		if !l.Since.IsZero() && l.Count > 0 {
			attrs = append(attrs, slog.Time("held_since", l.Since))
		}
	}
	if e.BackendPID != 0 {
		attrs = append(attrs, slog.Uint64("backend_pid", uint64(e.BackendPID)))
	}
	if e.Err != nil {
		attrs = append(attrs, slog.String("error", e.Err.Error()))
	}
	if fix := e.Rule.fix(); fix != "" {
		attrs = append(attrs, slog.String("fix", fix))
	}
	if heldBack > 0 {
		attrs = append(attrs, slog.Int("held_back", heldBack))
	}
	c.logger().LogAttrs(ctx, slog.LevelWarn, "pgadvlock: "+e.sentence(), attrs...)
}

// logLimit lets one event a minute through for each call site and rule, so
// that a leak in a hot path does not become a flood. Its memory is bounded:
// when it is full, it forgets everything and starts again.
type logLimit struct {
	mu    sync.Mutex
	sites map[logSite]*logged
}

type logSite struct {
	rule Rule
	file string
	line int
}

type logged struct {
	at       time.Time
	heldBack int // events since then that were not logged
}

const (
	logEvery    = time.Minute
	logSitesMax = 1024
)

// admit says whether to log the event, and how many like it were held back
// since the last one logged.
func (l *logLimit) admit(e Event) (ok bool, heldBack int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	site := logSite{e.Rule, e.Caller.File, e.Caller.Line}
	last := l.sites[site]
	if last == nil {
		if l.sites == nil || len(l.sites) >= logSitesMax {
			l.sites = make(map[logSite]*logged)
		}
		l.sites[site] = &logged{at: e.Time}
		return true, 0
	}
	if e.Time.Sub(last.at) < logEvery {
		last.heldBack++
		return false, 0
	}
	heldBack = last.heldBack
	*last = logged{at: e.Time}
	return true, heldBack
}

// sqlState returns the SQLSTATE of a PostgreSQL error of any driver: pgx's
// *pgconn.PgError and lib/pq's *Error both say it this way.
func sqlState(err error) string {
	var pg interface{ SQLState() string }
	if errors.As(err, &pg) {
		return pg.SQLState()
	}
	return ""
}
