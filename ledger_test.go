package pgadvlock_test

// The account against the truth: random programs on two connections, and
// after every statement the ledger is held against pg_locks.

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/pgadvlock/pgadvlock"
	"github.com/pgadvlock/pgadvlock/internal/pgtest"
)

// program is the state of one run of the property test.
type program struct {
	ctx       context.Context
	see       *pgtest.Observer
	connector *pgadvlock.Connector
	conns     [2]*sql.Conn
	pids      [2]uint32
	inTx      [2]bool // by what was sent, failed ones included
	// opaque adds statements that cannot be counted.
	opaque bool
}

// lockKey is the text of a key and how pg_locks shows it.
type lockKey struct{ sql, shown string }

// Keys of their own for what may wait, so that no run blocks; session and
// transaction locks apart, because pg_locks does not tell them apart.
func sessionKey(t *rapid.T, conn int, waits bool) lockKey {
	n := rapid.IntRange(1, 3).Draw(t, "key")
	if waits {
		n += 10 * (conn + 1)
	}
	if rapid.Bool().Draw(t, "pair") {
		return lockKey{fmt.Sprintf("%d, %d", -n, n), fmt.Sprintf("(%d, %d)", -n, n)}
	}
	return lockKey{fmt.Sprint(n), fmt.Sprint(n)}
}

func (p *program) exec(t *rapid.T, conn int, query string) error {
	_, err := p.conns[conn].ExecContext(p.ctx, query)
	if err != nil && sqlState(err) != "25P02" {
		t.Fatalf("connection %d: %s: %v", conn, query, err)
	}
	return err
}

func sqlState(err error) string {
	var pg interface{ SQLState() string }
	if errors.As(err, &pg) {
		return pg.SQLState()
	}
	return ""
}

// drawConn chooses a connection, and one of its statements' two modes.
func drawConn(t *rapid.T) int { return rapid.IntRange(0, 1).Draw(t, "connection") }

func shared(t *rapid.T) string {
	return rapid.SampledFrom([]string{"", "_shared"}).Draw(t, "mode")
}

// check holds the ledgers against pg_locks. Transaction locks (keys from 100)
// are an upper bound.
func (p *program) check(t *rapid.T) {
	want := map[string]bool{}
	xact := map[string]bool{}
	for _, l := range p.see.Locks() {
		key := fmt.Sprint(l.Key)
		if a, b, ok := l.Pair(); ok {
			key = fmt.Sprintf("(%d, %d)", a, b)
		}
		mode := map[string]string{"ExclusiveLock": "exclusive", "ShareLock": "share"}[l.Mode]
		line := fmt.Sprintf("%s %s of %d", key, mode, l.PID)
		if l.ObjSubID == 1 && l.Key >= 100 {
			xact[line] = true
		} else {
			want[line] = true
		}
	}
	got := map[string]bool{}
	for _, s := range p.connector.Sessions() {
		if !s.Exact && !p.opaque {
			t.Fatalf("the ledger of %d is not exact", s.BackendPID)
		}
		if !s.Exact { // then nothing is said; what its backend holds is left out
			for line := range want {
				if strings.HasSuffix(line, fmt.Sprintf(" of %d", s.BackendPID)) {
					delete(want, line)
				}
			}
			clear(xact) // of either: an upper bound only while transactions are seen
			continue
		}
		for _, l := range s.Held {
			line := fmt.Sprintf("%s %s of %d", l.Key, l.Mode, s.BackendPID)
			if l.Scope == pgadvlock.ScopeTransaction {
				delete(xact, line)
				continue
			}
			got[line] = true
		}
	}
	if !equalSets(got, want) {
		t.Fatalf("the ledgers say %v, pg_locks says %v", sorted(got), sorted(want))
	}
	if len(xact) > 0 {
		t.Fatalf("transaction locks that no ledger has: %v", sorted(xact))
	}
}

func equalSets(a, b map[string]bool) bool { return slices.Equal(sorted(a), sorted(b)) }

func sorted(set map[string]bool) []string {
	var s []string
	for k := range set {
		s = append(s, k)
	}
	slices.Sort(s)
	return s
}

// counts unlocks everything that is known one at a time: the server must answer true exactly
// as often as the ledger says, and the ledger must follow.
func (p *program) counts(t *rapid.T) {
	for conn := range p.conns {
		if p.inTx[conn] {
			if _, err := p.conns[conn].ExecContext(p.ctx, "ROLLBACK"); err != nil {
				t.Fatal(err)
			}
			p.inTx[conn] = false
		}
	}
	for _, s := range p.connector.Sessions() {
		if !s.Exact {
			continue
		}
		conn := p.conns[slices.Index(p.pids[:], s.BackendPID)]
		for _, l := range s.Held {
			suffix := ""
			if l.Mode == pgadvlock.ShareLock {
				suffix = "_shared"
			}
			args := l.Key.String()
			if a, b, ok := l.Key.Ints(); ok {
				args = fmt.Sprintf("%d, %d", a, b)
			}
			for i := range l.Count + 1 {
				var released bool
				if err := conn.QueryRowContext(p.ctx, fmt.Sprintf("SELECT pg_advisory_unlock%s(%s)", suffix, args)).Scan(&released); err != nil {
					t.Fatal(err)
				}
				if released != (i < l.Count) {
					t.Fatalf("unlock %d of %v in %v answers %t", i+1, l, s, released)
				}
			}
		}
	}
	for _, s := range p.connector.Sessions() {
		if s.Exact || !p.opaque {
			t.Fatalf("after unlocking everything the ledgers say %+v", s)
		}
	}
}

func TestLedgerEqualsPgLocks(t *testing.T) {
	b := setUp(t)
	rapid.Check(t, func(t *rapid.T) {
		p := newProgram(t, b)
		defer p.close()
		p.run(t)
		p.check(t)
		p.counts(t)
	})
}

// With statements that cannot be counted as well, on two databases: while a
// ledger is exact it equals pg_locks, counts too, and when the connections have been
// returned nothing is held, exact or not.
func TestNothingIsHeldAfterRandomPrograms(t *testing.T) {
	t.Parallel()
	server := pgtest.Shared(t)
	var benches []bench
	for range 2 {
		// A DISCARD ALL of the program's own breaks what pgx has cached, here
		// as on plain pgx: so nothing is cached.
		benches = append(benches, setUpOn(t, server.DSN(server.NewDB(t))+simple))
	}
	rapid.Check(t, func(t *rapid.T) {
		for _, b := range benches {
			p := newProgram(t, b)
			defer p.close() // also when the run fails
			p.opaque = true
			p.forget(t)
			p.run(t)
			p.check(t)
			p.counts(t)
			p.close()
			if locks := b.see.Locks(); len(locks) > 0 {
				t.Fatalf("after the return the server shows %v", locks)
			}
			if s := p.connector.Sessions(); len(s) > 0 {
				t.Fatalf("after the return the ledgers say %+v", s)
			}
		}
	})
}

func newProgram(t *rapid.T, b bench) *program {
	connector, _ := pgadvlock.ConnectorOf(b.db)
	p := &program{ctx: context.Background(), see: b.see, connector: connector}
	for i := range p.conns {
		var err error
		if p.conns[i], err = b.db.Conn(p.ctx); err != nil {
			t.Fatal(err)
		}
		if err := p.conns[i].QueryRowContext(p.ctx, "SELECT pg_backend_pid()").Scan(&p.pids[i]); err != nil {
			t.Fatal(err)
		}
	}
	return p
}

// forget drops what an earlier program prepared: it survives the return, and
// would wait for ever for a key that is now the other connection's.
func (p *program) forget(t *rapid.T) {
	for conn := range p.conns {
		_ = p.exec(t, conn, "DEALLOCATE ALL")
	}
}

func (p *program) close() {
	for _, c := range p.conns {
		c.Close()
	}
}

// opaques are statements that lock in a way that cannot be counted; each %s is
// a key of the connection's own.
var opaques = []string{
	"DO $$ BEGIN PERFORM pg_advisory_lock(%s); END $$",
	"DO $$ BEGIN PERFORM pg_advisory_unlock(%s); END $$",
	"SELECT pg_advisory_lock(%s) FROM generate_series(1, 2)",
	"WITH l AS MATERIALIZED (SELECT pg_try_advisory_lock_shared(%s)) SELECT * FROM l",
	"SELECT 1 WHERE pg_try_advisory_lock(%s)",
	"SELECT pg_advisory_unlock(%s) FROM generate_series(1, 3)",
	"CREATE TEMP TABLE IF NOT EXISTS scratch AS SELECT pg_try_advisory_lock(%s)",
	"COPY (SELECT pg_advisory_lock(%s)) TO STDOUT",
	"EXPLAIN ANALYZE SELECT pg_advisory_lock(%s)",
	"PREPARE p AS SELECT pg_advisory_lock(%s)",
	"EXECUTE p",
	"DEALLOCATE p",
	"DEALLOCATE ALL",
	"DISCARD ALL",
	"SELECT pg_advisory_unlock_all(); SELECT 1",
	"SELECT pg_advisory_lock(%s); SELECT 1/0",
}

// tolerated are errors that random programs run into.
var tolerated = []string{
	"25P02", // in a failed transaction
	"25001", // DISCARD ALL in a transaction
	"42P05", // PREPARE of a name that is taken
	"26000", // EXECUTE of one that is not there
	"22012", // division by zero
}

func (p *program) run(t *rapid.T) {
	actions := map[string]func(*rapid.T){
		"": p.check,
		"acquire": func(t *rapid.T) {
			c := drawConn(t)
			_ = p.exec(t, c, fmt.Sprintf("SELECT pg_advisory_lock%s(%s)", shared(t), sessionKey(t, c, true).sql))
		},
		"try": func(t *rapid.T) {
			c := drawConn(t)
			_ = p.exec(t, c, fmt.Sprintf("SELECT pg_try_advisory_lock%s(%s)", shared(t), sessionKey(t, c, rapid.Bool().Draw(t, "own")).sql))
		},
		"two calls": func(t *rapid.T) {
			c := drawConn(t)
			_ = p.exec(t, c, fmt.Sprintf("SELECT pg_try_advisory_lock%s(%s) AS a, pg_advisory_unlock%s(%s)",
				shared(t), sessionKey(t, c, true).sql, shared(t), sessionKey(t, c, true).sql))
		},
		"release": func(t *rapid.T) { // of what is held, or not: wrong mode, space and key included
			c := drawConn(t)
			_ = p.exec(t, c, fmt.Sprintf("SELECT pg_advisory_unlock%s(%s)", shared(t), sessionKey(t, c, rapid.Bool().Draw(t, "own")).sql))
		},
		"many": func(t *rapid.T) { // more than are looked through one by one
			c := drawConn(t)
			calls := make([]string, rapid.IntRange(1, 12).Draw(t, "calls"))
			for i := range calls {
				calls[i] = fmt.Sprintf("pg_advisory_lock%s(%d)", shared(t), 40+20*c+i)
			}
			_ = p.exec(t, c, "SELECT "+strings.Join(calls, ", "))
		},
		"one of many": func(t *rapid.T) {
			c := drawConn(t)
			_ = p.exec(t, c, fmt.Sprintf("SELECT pg_advisory_unlock%s(%d)", shared(t), 40+20*c+rapid.IntRange(0, 11).Draw(t, "key")))
		},
		"release all": func(t *rapid.T) { _ = p.exec(t, drawConn(t), "SELECT pg_advisory_unlock_all()") },
		"transaction lock": func(t *rapid.T) {
			c := drawConn(t)
			_ = p.exec(t, c, fmt.Sprintf("SELECT pg_advisory_xact_lock%s(%d)", shared(t), rapid.IntRange(100, 102).Draw(t, "key")+10*c))
		},
		"begin": func(t *rapid.T) {
			c := drawConn(t)
			if p.exec(t, c, "BEGIN") == nil {
				p.inTx[c] = true
			}
		},
		"end": func(t *rapid.T) {
			c := drawConn(t)
			if !p.inTx[c] {
				t.Skip("no transaction")
			}
			how := rapid.SampledFrom([]string{"COMMIT", "ROLLBACK", "END", "ABORT", "COMMIT AND CHAIN", "ROLLBACK AND CHAIN"}).Draw(t, "how")
			if p.exec(t, c, how) == nil {
				p.inTx[c] = len(how) > len("ROLLBACK")
			}
		},
		"savepoint": func(t *rapid.T) {
			c := drawConn(t)
			if !p.inTx[c] {
				t.Skip("no transaction")
			}
			name := rapid.SampledFrom([]string{"a", "b"}).Draw(t, "savepoint")
			_ = p.exec(t, c, "SAVEPOINT "+name)
		},
		"to savepoint": func(t *rapid.T) {
			c := drawConn(t)
			if !p.inTx[c] {
				t.Skip("no transaction")
			}
			how := rapid.SampledFrom([]string{"ROLLBACK TO ", "RELEASE "}).Draw(t, "how")
			name := rapid.SampledFrom([]string{"a", "b"}).Draw(t, "savepoint")
			const noSuchSavepoint = "3B001"
			if _, err := p.conns[c].ExecContext(p.ctx, how+name); err != nil && sqlState(err) != "25P02" && sqlState(err) != noSuchSavepoint {
				t.Fatal(err)
			}
		},
		"fail": func(t *rapid.T) {
			c := drawConn(t)
			if _, err := p.conns[c].ExecContext(p.ctx, "SELECT 1/0"); err == nil {
				t.Fatal("1/0 succeeded")
			}
		},
		"prepared": func(t *rapid.T) {
			c := drawConn(t)
			stmt, err := p.conns[c].PrepareContext(p.ctx, "SELECT pg_try_advisory_lock($1)")
			if sqlState(err) == "25P02" {
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			defer stmt.Close()
			if _, err := stmt.ExecContext(p.ctx, rapid.IntRange(1, 3).Draw(t, "key")); err != nil && sqlState(err) != "25P02" {
				t.Fatal(err)
			}
		},
	}
	if p.opaque {
		actions["opaque"] = func(t *rapid.T) {
			c := drawConn(t)
			query := rapid.SampledFrom(opaques).Draw(t, "statement")
			if strings.Contains(query, "%s") {
				query = fmt.Sprintf(query, sessionKey(t, c, true).sql)
			}
			if _, err := p.conns[c].ExecContext(p.ctx, query); err != nil && !slices.Contains(tolerated, sqlState(err)) {
				t.Fatalf("%s: %v", query, err)
			}
		}
	}
	t.Repeat(actions)
}
