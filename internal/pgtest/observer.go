package pgtest

// This file owns what tests see: locks from another connection, and the wait for
// a condition. It also owns freezing, which makes things to see.

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// Observer is another connection to a test's database: what it sees in pg_locks
// is the truth that tests assert on. It also takes locks itself, to stand in the
// way. Use it from the test's own goroutine: its methods end the test on errors.
type Observer struct {
	tb   testing.TB
	conn *pgx.Conn
}

// Lock is a row of pg_locks for an advisory lock, held or waited for. PostgreSQL
// shows no count, and does not tell session and transaction locks apart.
type Lock struct {
	ClassID, ObjID uint32
	ObjSubID       uint32 // 1: a bigint key; 2: a pair of int keys
	Key            int64  // of a bigint key, else 0
	Mode           string // "ExclusiveLock" or "ShareLock"
	PID            uint32 // of the backend
	Granted        bool
}

// Pair returns the two keys of a lock on a pair, and whether it is on one.
func (l Lock) Pair() (int32, int32, bool) {
	return int32(l.ClassID), int32(l.ObjID), l.ObjSubID == 2
}

// String reads "42 ExclusiveLock of 1234", or "(1, 9527) ShareLock wanted by 1234".
func (l Lock) String() string {
	key := fmt.Sprint(l.Key)
	if a, b, ok := l.Pair(); ok {
		key = fmt.Sprintf("(%d, %d)", a, b)
	}
	verb := "of"
	if !l.Granted {
		verb = "wanted by"
	}
	return fmt.Sprintf("%s %s %s %d", key, l.Mode, verb, l.PID)
}

// Observe opens an Observer, closed when the test ends.
func Observe(tb testing.TB, dsn string) *Observer {
	tb.Helper()
	cfg, err := pgx.ParseConfig(dsn)
	if err != nil {
		tb.Fatal(err)
	}
	cfg.RuntimeParams["application_name"] = "pgtest observer"
	cfg.DefaultQueryExecMode = pgx.QueryExecModeExec // one trip, nothing prepared: works through a pooler too
	ctx, cancel := context.WithTimeout(context.Background(), queryTimeout)
	defer cancel()
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second) // its server may be gone
		defer cancel()
		conn.Close(ctx)
	})
	return &Observer{tb, conn}
}

// Conn is the connection, for questions that Observer has no method for.
func (o *Observer) Conn() *pgx.Conn { return o.conn }

// PID is the process id of the backend that answers.
func (o *Observer) PID() uint32 {
	o.tb.Helper()
	return observe(o, "SELECT pg_backend_pid()::int8::oid", pgx.RowTo[uint32])[0]
}

// Locks lists the advisory locks of the database, held and waited for, in the order of keys.
func (o *Observer) Locks() []Lock {
	o.tb.Helper()
	return observe(o, `
		SELECT classid, objid, objsubid::int4::oid,
			CASE objsubid WHEN 1 THEN classid::int8 << 32 | objid::int8 ELSE 0 END, mode, pid::int8::oid, granted
		FROM pg_locks
		WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
		ORDER BY objsubid, classid, objid, granted DESC, mode, pid`, pgx.RowToStructByPos[Lock])
}

// observe returns all rows of a query.
func observe[T any](o *Observer, sql string, row pgx.RowToFunc[T], args ...any) []T {
	o.tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), queryTimeout)
	defer cancel()
	rows, _ := o.conn.Query(ctx, sql, args...) // CollectRows reports the error
	all, err := pgx.CollectRows(rows, row)
	if err != nil {
		o.tb.Fatalf("pgtest: observer: %v", err)
	}
	return all
}

// Held says whether some session holds the bigint key, in any mode.
func (o *Observer) Held(key int64) bool {
	o.tb.Helper()
	return slices.ContainsFunc(o.Locks(), func(l Lock) bool { return l.Granted && l.ObjSubID == 1 && l.Key == key })
}

// HeldPair says whether some session holds the pair of int keys, in any mode.
func (o *Observer) HeldPair(a, b int32) bool {
	o.tb.Helper()
	return slices.ContainsFunc(o.Locks(), func(l Lock) bool { return l.Granted && isPair(l, a, b) })
}

func isPair(l Lock, a, b int32) bool {
	x, y, ok := l.Pair()
	return ok && x == a && y == b
}

// Waiting says whether some session waits for the bigint key, in any mode.
func (o *Observer) Waiting(key int64) bool {
	o.tb.Helper()
	return slices.ContainsFunc(o.Locks(), func(l Lock) bool { return !l.Granted && l.ObjSubID == 1 && l.Key == key })
}

// Lock takes the key for the observer's session, and waits for it.
func (o *Observer) Lock(key int64) {
	o.tb.Helper()
	o.Exec("SELECT pg_advisory_lock($1)", key)
}

// TryLock takes the key for the observer's session if nobody is in the way.
func (o *Observer) TryLock(key int64) bool {
	o.tb.Helper()
	return observe(o, "SELECT pg_try_advisory_lock($1)", pgx.RowTo[bool], key)[0]
}

// Unlock releases the key, and fails the test if the observer did not hold it.
func (o *Observer) Unlock(key int64) {
	o.tb.Helper()
	if !observe(o, "SELECT pg_advisory_unlock($1)", pgx.RowTo[bool], key)[0] {
		o.tb.Fatalf("pgtest: observer does not hold %d", key)
	}
}

// Exec runs a statement.
func (o *Observer) Exec(sql string, args ...any) {
	o.tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), queryTimeout)
	defer cancel()
	if _, err := o.conn.Exec(ctx, sql, args...); err != nil {
		o.tb.Fatalf("pgtest: observer: %v", err)
	}
}

// WaitFor waits until the database's locks satisfy cond, and fails the test with
// the locks last seen when they do not within the bound.
func (o *Observer) WaitFor(bound time.Duration, what string, cond func([]Lock) bool) {
	o.tb.Helper()
	var locks []Lock
	if !poll(bound, func() bool { locks = o.Locks(); return cond(locks) }) {
		o.tb.Fatalf("pgtest: not within %s: %s; locks: %v", bound, what, locks)
	}
}

// Eventually waits until cond holds, and fails the test when it does not within the bound.
func Eventually(tb testing.TB, bound time.Duration, what string, cond func() bool) {
	tb.Helper()
	if !poll(bound, cond) {
		tb.Fatalf("pgtest: not within %s: %s", bound, what)
	}
}

// poll asks at least twice, the last time after the bound: a slow machine may
// sleep through it.
func poll(bound time.Duration, cond func() bool) bool {
	for deadline := time.Now().Add(bound); ; time.Sleep(2 * time.Millisecond) {
		last := time.Now().After(deadline)
		if cond() {
			return true
		}
		if last {
			return false
		}
	}
}

// Freeze stops a process without ending it, as a hung host would: a backend (see
// pg_backend_pid), a postmaster ([Server.PID]) or a PgBouncer. It goes on when
// resume is called, at the latest when the test ends.
func Freeze(tb testing.TB, pid int) (resume func()) {
	tb.Helper()
	if err := freeze(pid); err != nil {
		tb.Fatalf("pgtest: freeze %d: %v", pid, err)
	}
	tb.Cleanup(func() { thaw(pid) })
	return func() { thaw(pid) }
}
