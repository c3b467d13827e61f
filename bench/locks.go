package main

// This file owns the questions about locks: taking and giving back, handing
// over, coming back to the pool with one, and the first on a connection.

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pgadvlock/pgadvlock"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
)

const (
	lockText   = "SELECT pg_advisory_lock($1)"
	tryText    = "SELECT pg_try_advisory_lock($1)"
	xactText   = "SELECT pg_advisory_xact_lock($1)"
	unlockText = "SELECT pg_advisory_unlock($1)"

	key int64 = 42
)

func lock(c *sql.Conn, key int64) { must1(c.ExecContext(ctx, lockText, key)) }

var errNotTrue = errors.New("the server answered false")

// yesNo asks a try or an unlock, which must be answered true.
func yesNo(c *sql.Conn, text string, key int64) {
	var yes bool
	must(c.QueryRowContext(ctx, text, key).Scan(&yes))
	if !yes {
		must(fmt.Errorf("%s: %w", text, errNotTrue))
	}
}

func unlock(c *sql.Conn, key int64) { yesNo(c, unlockText, key) }

func lockUnlock(c *sql.Conn) {
	lock(c, key)
	unlock(c, key)
}

var lockJobs = []job{
	onConn("lock, unlock", lockUnlock),
	onConn("try, unlock", func(c *sql.Conn) {
		yesNo(c, tryText, key)
		unlock(c, key)
	}),
	onConn("BeginTx, transaction lock, Commit", func(c *sql.Conn) {
		tx := must1(c.BeginTx(ctx, nil))
		must1(tx.ExecContext(ctx, xactText, key))
		must(tx.Commit())
	}),
	{"lock, unlock, held already", func(g *ground, db *sql.DB) func(n int) time.Duration {
		conn := must1(db.Conn(ctx))
		g.after(func() { conn.Close() })
		run := work(func() { lockUnlock(conn) })
		return func(n int) time.Duration {
			lock(conn, key) // for the block only: all share one session
			defer unlock(conn, key)
			return run(n)
		}
	}},
	onDB("Conn, lock, unlock, Close", func(db *sql.DB) {
		conn := must1(db.Conn(ctx))
		lockUnlock(conn)
		must(conn.Close())
	}),
}

// runFakeLocks asks for the nanoseconds.
func runFakeLocks(b *bench) {
	t := b.table("Locks on a driver that does nothing", "Nanoseconds more than the driver underneath, and allocations more.")
	for _, j := range lockJobs {
		r, ok := b.race("fake", j.name+", fake driver", effort{block: 100 * time.Microsecond}, func(g *ground) []contestant {
			told := pgadvlock.WithPoolMode(pgadvlock.PoolDirect)
			entrants := append([]entrant{plain("inner"), plain("inner again"), ours("pgadvlock", told), oursSampled(told)}, middlewares()...)
			return contestants(g, fakeConnector{}, entrants, j.do)
		})
		if ok {
			t.add(j.name, r, moreCell)
		}
	}
}

func runLocks(b *bench) {
	for _, road := range []struct{ name, dsn string }{{"Unix socket", b.server.socket}, {"TCP", b.server.tcp}} {
		t := b.table("Locks, "+road.name, "Time by pgx's.")
		for i, j := range lockJobs {
			entrants := []entrant{plain("pgx"), plain("pgx again"), ours("pgadvlock"), oursSampled()}
			if road.dsn == b.server.socket {
				entrants = append(entrants, middlewares()...)
			} else if i > 0 {
				break
			}
			if i == len(lockJobs)-1 { // the one that comes back to the pool
				entrants = append(entrants, resetters(road.dsn, 1)...)
			}
			name := j.name + ", " + road.name
			r, ok := b.race("locks", name, effort{block: time.Millisecond}, func(g *ground) []contestant {
				base := lend(g, road.dsn)
				cs := contestants(g, base, entrants, j.do)
				if i == 0 {
					cs = append(cs, contestants(g, base, []entrant{oursBatched()}, j.do)...)
					cs = append(cs, contestants(g, base, []entrant{plain("pgx + 3 bare spans")}, bareSpans(false))...)
					cs = append(cs, contestants(g, base, []entrant{plain("pgx + 3 bare spans, batched")}, bareSpans(true))...)
				}
				return cs
			})
			if !ok {
				continue
			}
			t.add(j.name, r, ratioCell)
			if i == 0 {
				b.judge(barRatio(name+", no SDK", 1.10, r))
				b.judge(barRatioOf(name+", sampled spans", 1.25, r, peers))
			}
		}
	}
	runHandOver(b)
}

// bareSpans is lock and unlock with the spans that docs/telemetry.md promises for
// them, made by hand from attributes that are there already: the least that
// OpenTelemetry's SDK takes for it, whoever asks.
func bareSpans(batches bool) func(*ground, *sql.DB) func(n int) time.Duration {
	return func(g *ground, db *sql.DB) func(n int) time.Duration {
		conn := must1(db.Conn(ctx))
		g.after(func() { conn.Close() })
		tracer := sampling(g, batches).Tracer("bench")
		var attrs [9]attribute.KeyValue
		for i := range attrs {
			attrs[i] = attribute.String(fmt.Sprintf("pgadvlock.attribute%d", i), "value")
		}
		var server [5]attribute.KeyValue
		for i := range server {
			server[i] = attribute.String(fmt.Sprintf("server.attribute%d", i), "value")
		}
		start := []trace.SpanStartOption{trace.WithSpanKind(trace.SpanKindClient), trace.WithAttributes(server[:]...)}
		return work(func() {
			_, wait := tracer.Start(ctx, "pg_advisory_lock", start...)
			lock(conn, key)
			_, hold := tracer.Start(ctx, "advisory lock held", trace.WithLinks(trace.Link{SpanContext: wait.SpanContext()}), trace.WithAttributes(attrs[:]...))
			wait.SetAttributes(attrs[:]...)
			wait.End()
			_, wait = tracer.Start(ctx, "pg_advisory_unlock", start...)
			unlock(conn, key)
			wait.SetAttributes(attrs[:]...)
			wait.End()
			hold.SetAttributes(server[0])
			hold.End()
		})
	}
}

// runHandOver lets two workers contend for one key: each asks for it again as
// soon as it has given it back, so that it goes from one to the other.
func runHandOver(b *bench) {
	handOver := func(g *ground, db *sql.DB) func(n int) time.Duration {
		db.SetMaxOpenConns(2)
		var workers [2]*sql.Conn
		for i := range workers {
			workers[i] = must1(db.Conn(ctx))
			g.after(func() { workers[i].Close() })
		}
		return func(n int) time.Duration {
			return together(len(workers), func(i int) {
				for range (n + 1) / len(workers) {
					lockUnlock(workers[i])
				}
			})
		}
	}
	r, ok := b.race("locks", "hand-over", effort{block: 4 * time.Millisecond}, func(g *ground) []contestant {
		base := stdlib.GetConnector(*must1(pgx.ParseConfig(b.server.socket)))
		return contestants(g, base, []entrant{plain("pgx"), plain("pgx again"), ours("pgadvlock"), oursSampled()}, handOver)
	})
	if ok {
		b.table("Two workers hand one lock over, Unix socket", "Time by pgx's, with connections of its own for each contestant.").add("lock, unlock", r, ratioCell)
	}
}

// together lets several goroutines work, and says how long it took until the last
// was done.
func together(workers int, do func(i int)) time.Duration {
	done := make(chan any)
	start := time.Now()
	for i := range workers {
		go func() {
			defer func() { done <- recover() }()
			do(i)
		}()
	}
	var failed any
	for range workers {
		if p := <-done; p != nil {
			failed = p
		}
	}
	took := time.Since(start)
	if failed != nil {
		panic(failed)
	}
	return took
}

// runPQ wraps lib/pq, whose sessions cannot be asked what stands between: it is
// said.
func runPQ(b *bench) {
	t := b.table("Around lib/pq, Unix socket", "Time by lib/pq's.")
	for _, j := range []job{serverJobs[0], serverJobs[1], lockJobs[0]} {
		r, ok := b.race("lib/pq", j.name+", lib/pq", effort{block: time.Millisecond}, func(g *ground) []contestant {
			return contestants(g, lendPQ(g, b.server.socket), []entrant{
				plain("lib/pq"), plain("lib/pq again"), ours("pgadvlock", pgadvlock.WithPoolMode(pgadvlock.PoolDirect)),
			}, j.do)
		})
		if ok {
			t.add(j.name, r, ratioCell)
		}
	}
}

// runDirty asks what it costs to come back holding a lock: the time of Close
// only, by that of a SELECT 1.
func runDirty(b *bench) {
	comesBack := func(take func(*sql.Conn)) func(*ground, *sql.DB) func(n int) time.Duration {
		return func(_ *ground, db *sql.DB) func(n int) time.Duration {
			return func(n int) (took time.Duration) {
				for range n {
					conn := must1(db.Conn(ctx))
					take(conn)
					start := time.Now()
					must(conn.Close())
					took += time.Since(start)
				}
				return took
			}
		}
	}
	exact := comesBack(func(c *sql.Conn) { lock(c, key) })
	tainted := comesBack(func(c *sql.Conn) {
		must1(c.ExecContext(ctx, "SELECT pg_advisory_lock(i) FROM generate_series(1, $1) i", 1))
	})
	r, ok := b.race("locks", "dirty return", effort{block: time.Millisecond}, func(g *ground) []contestant {
		base := lend(g, b.server.socket)
		selectOne := work(func() { must1(base.(lender).conn.(lent).Conn().PgConn().Exec(ctx, "SELECT 1").ReadAll()) })
		cs := []contestant{{"SELECT 1", selectOne}, {"SELECT 1 again", selectOne}}
		cs = append(cs, contestants(g, base, []entrant{ours("pgadvlock, exact")}, exact)...)
		cs = append(cs, contestants(g, base, []entrant{ours("pgadvlock, tainted")}, tainted)...)
		cs = append(cs, contestants(g, base, []entrant{plain("SELECT 1 through database/sql")}, onDB("", func(db *sql.DB) {
			var one int
			must(db.QueryRowContext(ctx, "SELECT 1").Scan(&one))
		}).do)...)
		return append(cs, contestants(g, base, resetters(b.server.socket, 1)[:1], exact)...)
	})
	if ok {
		b.table("Coming back to the pool with a lock, Unix socket", "Time of Close by that of a SELECT 1 in pgx's simple protocol, which the release uses as well.").add("Close", r, ratioCell)
		b.judge(barRatio("dirty return, exact", 1.3, r))
	}
}

// runFirst asks what the first lock on a connection costs: in round trips, which
// are counted, and in time.
func runFirst(b *bench) {
	for _, count := range []struct {
		what  string
		locks bool
		limit float64
	}{
		{"clean return: round trips more", false, 0},
		{"first lock of a direct connection: round trips more", true, 1},
	} {
		if b.wanted(count.what) {
			b.judge(barCount(count.what, count.limit, float64(trips(b, count.locks))))
		}
	}

	// Each piece of work is one connection, which is made before the clock
	// runs.
	firstLock := func(db *sql.DB) func(n int) time.Duration {
		return func(n int) (took time.Duration) {
			for range n {
				conn := must1(db.Conn(ctx))
				start := time.Now()
				lock(conn, key)
				took += time.Since(start)
				unlock(conn, key)
				must(conn.Close())
			}
			return took
		}
	}
	open := func(g *ground, dsn string, e entrant) *sql.DB {
		db := e.open(g, stdlib.GetConnector(*must1(pgx.ParseConfig(dsn))))
		g.after(func() { db.Close() })
		db.SetMaxIdleConns(-1) // so that each connection is new
		return db
	}
	t := b.table("The first lock of a connection", "Time by pgx's.")
	r, ok := b.race("locks", "first lock, direct", effort{block: time.Millisecond, max: 1}, func(g *ground) []contestant {
		var cs []contestant
		for _, e := range []entrant{plain("pgx"), plain("pgx again"), ours("pgadvlock"), ours("pgadvlock, dead_peer=0", pgadvlock.WithDeadPeer(0))} {
			cs = append(cs, contestant{e.name, firstLock(open(g, b.server.socket, e))})
		}
		return cs
	})
	if ok {
		t.add("direct, Unix socket", r, ratioCell)
	}
	if !b.server.HasBouncer() {
		b.note("First lock through PgBouncer: not measured, it is not installed.")
		return
	}
	r, ok = b.race("locks", "first lock, PgBouncer", effort{block: time.Millisecond, max: 1}, func(g *ground) []contestant {
		dsn := b.server.BouncerDSN(b.server.db, "session")
		var cs []contestant
		for _, e := range []entrant{plain("pgx"), plain("pgx again"), ours("pgadvlock")} {
			cs = append(cs, contestant{e.name, firstLock(open(g, dsn, e))})
		}
		return append(cs, contestant{"pgadvlock, first of the program", func(n int) (took time.Duration) {
			for range n { // nothing is known of the road
				db := ours("").open(g, stdlib.GetConnector(*must1(pgx.ParseConfig(dsn))))
				took += firstLock(db)(1)
				must(db.Close())
			}
			return took
		}})
	})
	if ok {
		t.add("PgBouncer, session mode", r, ratioCell)
	}
}

// trips counts the round trips that pgadvlock makes more than pgx: of a
// statement and the return of its connection, or of the first lock of a
// connection and what follows.
func trips(b *bench, locks bool) int64 {
	count := func(e entrant) int64 {
		var g ground
		defer g.close()
		var writes atomic.Int64
		cfg := must1(pgx.ParseConfig(b.server.tcp))
		cfg.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
			c, err := new(net.Dialer).DialContext(ctx, network, address)
			return countingConn{c, &writes}, err
		}
		db := e.open(&g, stdlib.GetConnector(*cfg))
		g.after(func() { db.Close() })
		conn := must1(db.Conn(ctx))
		writes.Store(0)
		must1(conn.ExecContext(ctx, "SELECT 1"))
		if locks {
			lockUnlock(conn)
		}
		must(conn.Close())
		return writes.Load()
	}
	return count(ours("")) - count(plain(""))
}

// countingConn counts writes: pgx writes once for each round trip.
type countingConn struct {
	net.Conn
	writes *atomic.Int64
}

func (c countingConn) Write(p []byte) (int, error) {
	c.writes.Add(1)
	return c.Conn.Write(p)
}
