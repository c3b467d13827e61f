package pgadvlock_test

// The account against the truth: random programs on two connections, and
// after every statement the ledger is held against pg_locks.

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
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
	if s, ok := err.(interface{ SQLState() string }); ok {
		return s.SQLState()
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
		if !s.Exact {
			t.Fatalf("the ledger of %d is not exact", s.BackendPID)
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

// counts unlocks everything one at a time: the server must answer true exactly
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
	if s := p.connector.Sessions(); len(s) > 0 {
		t.Fatalf("after unlocking everything the ledgers say %+v", s)
	}
}

func TestLedgerEqualsPgLocks(t *testing.T) {
	b := setUp(t)
	connector, _ := pgadvlock.ConnectorOf(b.db)
	rapid.Check(t, func(t *rapid.T) {
		p := &program{ctx: context.Background(), see: b.see, connector: connector}
		for i := range p.conns {
			var err error
			if p.conns[i], err = b.db.Conn(p.ctx); err != nil {
				t.Fatal(err)
			}
			defer p.conns[i].Close()
			if err := p.conns[i].QueryRowContext(p.ctx, "SELECT pg_backend_pid()").Scan(&p.pids[i]); err != nil {
				t.Fatal(err)
			}
		}
		p.run(t)
		p.check(t)
		p.counts(t)
	})
}

func (p *program) run(t *rapid.T) {
	t.Repeat(map[string]func(*rapid.T){
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
	})
}
