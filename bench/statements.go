package main

// This file owns the questions about statements that have nothing to do with
// locks: on a driver that does nothing, for the nanoseconds, and on a server, for
// what a program notices.

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgadvlock/pgadvlock/internal/locksql"
)

var ctx = context.Background()

// statement is 60 bytes long, as the bar has it.
const statement = "SELECT id, name, email FROM users WHERE id = $1 AND org = $2"

// job is work that a contestant does through its *sql.DB.
type job struct {
	name string
	do   func(*ground, *sql.DB) func(n int) time.Duration
}

// onConn makes a job of what is done on one *sql.Conn again and again.
func onConn(name string, piece func(*sql.Conn)) job {
	return job{name, func(g *ground, db *sql.DB) func(n int) time.Duration {
		conn := must1(db.Conn(ctx))
		g.after(func() { conn.Close() })
		return work(func() { piece(conn) })
	}}
}

// onDB makes a job of what takes a connection from the pool, and gives it back.
func onDB(name string, piece func(*sql.DB)) job {
	return job{name, func(g *ground, db *sql.DB) func(n int) time.Duration {
		return work(func() { piece(db) })
	}}
}

func query(text string) func(*sql.Conn) {
	return func(c *sql.Conn) {
		rows := must1(c.QueryContext(ctx, text, 1, 2))
		for rows.Next() {
		}
		must(rows.Close())
	}
}

// fakeJobs are what the bars for nanoseconds and allocations are about; none is -1.
var fakeJobs = []struct {
	job
	nanos, allocs float64
}{
	{onConn("Query, Next, Close", query(statement)), 15, 0},
	{onConn("Exec", func(c *sql.Conn) { must1(c.ExecContext(ctx, statement, 1, 2)) }), 15, 0},
	{onConn("Prepare, Exec, Close", func(c *sql.Conn) {
		s := must1(c.PrepareContext(ctx, statement))
		must1(s.ExecContext(ctx, 1, 2))
		must(s.Close())
	}), 15, 0},
	{onConn("BeginTx, Commit", func(c *sql.Conn) { must(must1(c.BeginTx(ctx, nil)).Commit()) }), -1, 1},
	{onDB("Conn, Close", func(db *sql.DB) { must(must1(db.Conn(ctx)).Close()) }), -1, -1},
	{onDB("Query on the DB", func(db *sql.DB) {
		rows := must1(db.QueryContext(ctx, statement, 1, 2))
		for rows.Next() {
		}
		must(rows.Close())
	}), -1, -1},
}

func runFake(b *bench) {
	t := b.table("A driver that does nothing", "Nanoseconds more than the driver underneath, and allocations more. Statements are of 60 bytes and on one *sql.Conn; the last two take a connection from the pool and give it back.")
	for _, j := range fakeJobs {
		r, ok := b.race("fake", j.name+", fake driver", effort{block: 100 * time.Microsecond}, func(g *ground) []contestant {
			return contestants(g, fakeConnector{}, append([]entrant{plain("inner"), plain("inner again"), ours("pgadvlock")}, middlewares()...), j.do)
		})
		if !ok {
			continue
		}
		t.add(j.name, r, moreCell)
		if j.nanos >= 0 {
			b.judge(barMore(j.name+", 60 bytes, fake driver", j.nanos, r))
		}
		if j.allocs >= 0 {
			b.judge(barCount(j.name+": allocations more", j.allocs, r.moreAllocs(first)))
		}
	}
}

// runReturn asks what a connection costs that comes back clean: of a real pgx
// connection, whose state is looked at.
func runReturn(b *bench) {
	r, ok := b.race("fake", "clean return", effort{block: 50 * time.Microsecond}, func(g *ground) []contestant {
		db := ours("").open(g, lend(g, b.server.socket))
		g.after(func() { db.Close() })
		conn := must1(db.Conn(ctx))
		g.after(func() { conn.Close() })
		var validator driver.Validator
		must(conn.Raw(func(c any) error { validator = c.(driver.Validator); return nil }))
		return []contestant{
			{"a Validator that says yes", asks(yes{})},
			{"the same again", asks(yes{})},
			{"pgadvlock", asks(validator)},
		}
	})
	if ok {
		b.judge(barMore("clean return (IsValid), on pgx", 10, r))
	}
}

type yes struct{}

func (yes) IsValid() bool { return true }

func asks(v driver.Validator) func(n int) time.Duration {
	return work(func() {
		if !v.IsValid() {
			panic(failure{fmt.Errorf("a clean connection was not valid")})
		}
	})
}

// runPrefilter asks how fast a text is looked through. A search of the standard
// library for the word, in one case only, is its peer.
func runPrefilter(b *bench) {
	recognizer := locksql.New(nil)
	t := b.table("The prefilter", "GB/s. The texts are an ORM's; the last is the worst there is, the prefilter's byte and nothing else. strings.Contains looks for lower case only.")
	for _, text := range []struct{ name, text string }{
		{"60 B", statement},
		{"1 KB", ormText(1 << 10)},
		{"10 KB", ormText(10 << 10)},
		{"100 KB", ormText(100 << 10)},
		{"100 KB of v", strings.Repeat("v", 100<<10)},
	} {
		mentions := work(func() { sink = recognizer.Mentions(text.text) })
		r, ok := b.race("fake", "prefilter, "+text.name, effort{block: 50 * time.Microsecond}, func(*ground) []contestant {
			return []contestant{
				{"Mentions", mentions},
				{"Mentions again", mentions},
				{"strings.Contains", work(func() { sink = strings.Contains(text.text, "advisory") })},
				{"strings.Contains(strings.ToLower)", work(func() { sink = strings.Contains(strings.ToLower(text.text), "advisory") })},
			}
		})
		if !ok {
			continue
		}
		size := float64(len(text.text))
		t.add(text.name, r, func(r result, i int) string { return inverse(r.time(i), size).text("GB/s") })
		if n := len(text.text); n >= 1<<10 && !strings.HasPrefix(text.text, "v") {
			b.judge(barRate("prefilter, "+text.name, 6, r, size))
		}
	}
}

var sink bool

// inverse turns nanoseconds for so many bytes into GB/s.
func inverse(e estimate, size float64) estimate {
	return estimate{size / e.mid, size / e.hi, size / e.lo}
}

// ormText is SQL as an ORM writes it, n bytes, with no lock call in it.
func ormText(n int) string {
	const row = `SELECT "orders"."id", "orders"."customer_id", "orders"."total_value", "orders"."created_at" FROM "orders" ` +
		`INNER JOIN "invoices" ON "invoices"."order_id" = "orders"."id" WHERE "orders"."deleted_at" IS NULL AND ` +
		`"orders"."status" IN ($1, $2, $3) AND "invoices"."vat_rate" >= $4 ORDER BY "orders"."created_at" DESC LIMIT 50 `
	return strings.Repeat(row, n/len(row)+1)[:n]
}

// serverSchema is what the statements of serverJobs find.
const serverSchema = `
	CREATE TABLE users (id int8 PRIMARY KEY, org int8 NOT NULL, name text NOT NULL, email text NOT NULL);
	INSERT INTO users SELECT i, 1, 'user ' || i, 'user' || i || '@example.com' FROM generate_series(1, 1000) i;
	CREATE UNLOGGED TABLE visits (id int8 PRIMARY KEY, n int8 NOT NULL) WITH (fillfactor = 10);
	INSERT INTO visits VALUES (1, 0);
	CREATE UNLOGGED TABLE copied (id int8, name text);
	ANALYZE`

const (
	update   = "UPDATE visits SET n = n + 1 WHERE id = $1"
	allUsers = "SELECT id, name, email FROM users"
)

type scanner interface{ Scan(...any) error }

func scanUser(row scanner) {
	var id int64
	var name, email string
	must(row.Scan(&id, &name, &email))
}

// serverJobs are done through the DB, so that each includes the return of the
// connection.
var serverJobs = []job{
	onDB("QueryRow", func(db *sql.DB) { scanUser(db.QueryRowContext(ctx, statement, 7, 1)) }),
	onDB("Exec", func(db *sql.DB) { must1(db.ExecContext(ctx, update, 1)) }),
	onDB("BeginTx, Exec, Commit", func(db *sql.DB) {
		tx := must1(db.BeginTx(ctx, nil))
		must1(tx.ExecContext(ctx, update, 1))
		must(tx.Commit())
	}),
	{"prepared QueryRow", func(g *ground, db *sql.DB) func(n int) time.Duration {
		stmt := must1(db.PrepareContext(ctx, statement))
		g.after(func() { stmt.Close() })
		return work(func() { scanUser(stmt.QueryRowContext(ctx, 7, 1)) })
	}},
	onDB("1,000 rows", func(db *sql.DB) {
		rows := must1(db.QueryContext(ctx, allUsers))
		for rows.Next() {
			scanUser(rows)
		}
		must(rows.Err())
	}),
}

func runServer(b *bench) {
	for _, road := range []struct{ name, dsn string }{{"Unix socket", b.server.socket}, {"TCP", b.server.tcp}} {
		t := b.table("Statements without a lock, "+road.name, "Time by pgx's.")
		for _, j := range serverJobs {
			entrants := []entrant{plain("pgx"), plain("pgx again"), ours("pgadvlock")}
			if road.dsn == b.server.socket {
				entrants = append(entrants, middlewares()...)
				if j.name != "prepared QueryRow" { // DISCARD ALL drops them
					entrants = append(entrants, resetters(road.dsn, 1)...)
				}
			}
			name := j.name + ", " + road.name
			r, ok := b.race("server", name, effort{block: time.Millisecond}, func(g *ground) []contestant {
				return contestants(g, lend(g, road.dsn), entrants, j.do)
			})
			if ok {
				t.add(j.name, r, ratioCell)
				b.judge(barRatio(name, 1.01, r))
			}
		}
	}
	runCopy(b)
}

// runCopy asks what COPY through Raw costs: a connection that was lent out raw
// is cleaned when it comes back, so there is no bar.
func runCopy(b *bench) {
	rows := make([][]any, 1000)
	for i := range rows {
		rows[i] = []any{int64(i), "somebody"}
	}
	copying := onDB("COPY of 1,000 rows", func(db *sql.DB) {
		conn := must1(db.Conn(ctx))
		must(conn.Raw(func(c any) error {
			_, err := c.(interface{ Conn() *pgx.Conn }).Conn().CopyFrom(ctx, pgx.Identifier{"copied"}, []string{"id", "name"}, pgx.CopyFromRows(rows))
			return err
		}))
		must(conn.Close())
	})
	inTurn := job{copying.name, func(g *ground, db *sql.DB) func(n int) time.Duration {
		run := copying.do(g, db)
		return func(n int) time.Duration {
			must1(db.ExecContext(ctx, "TRUNCATE copied"))
			return run(n)
		}
	}}
	r, ok := b.race("server", copying.name, effort{block: 2 * time.Millisecond}, func(g *ground) []contestant {
		return contestants(g, lend(g, b.server.socket), []entrant{plain("pgx"), plain("pgx again"), ours("pgadvlock")}, inTurn.do)
	})
	if ok {
		b.table("COPY through Raw, Unix socket", "Time by pgx's. The connection comes back unknown, so it is cleaned: a round trip more.").add(copying.name, r, ratioCell)
	}
}
