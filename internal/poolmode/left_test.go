package poolmode

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/pgadvlock/pgadvlock/internal/pgtest"
)

// After many probes of all kinds, the servers are as if there had been none.
func TestNothingLeftBehind(t *testing.T) {
	s := pgtest.Shared(t)
	s.RequireBouncer(t)
	noLeaks(t)
	db := s.NewDB(t)
	kinds := []struct {
		mode Mode
		dsn  string
	}{
		{Direct, far(t, s.DSN(db), 0)},
		{Session, s.BouncerDSN(db, "session")},
		{Transaction, s.BouncerDSN(db, "transaction")},
		{Statement, s.BouncerDSN(db, "statement")},
	}
	for i := range 5 * probes(t) {
		kind := kinds[i%len(kinds)]
		if v, _ := probeOnce(t, kind.dsn); v.Mode != kind.mode {
			t.Errorf("the mode is %q, want %q: %s", v.Mode, kind.mode, v.Evidence)
		}
	}
	asBefore(t, s, db, kinds[1].dsn, kinds[2].dsn, kinds[3].dsn)
}

// The same where it takes step 4 to find transaction pooling, for C and B share no
// pool: then C LISTENs on a backend that is everybody's.
func TestNoListenLeftBehind(t *testing.T) {
	s := pgtest.Shared(t)
	b := s.Bouncer(t)
	for _, tt := range []struct{ name, evidence string }{
		{"the same backend", "did not reach an idle client"},
		{"another backend", "was moved from backend"}, // than the one before
	} {
		t.Run(tt.name, func(t *testing.T) {
			noLeaks(t)
			db := s.NewDB(t)
			pooled := b.DSN(db, "transaction")
			other := connect(t, pooled)
			dsn := proxy(t, pooled, func(n int, w *wire) string {
				switch n {
				case 1: // C, after the caller's
					w.fromClient = func(m pgproto3.FrontendMessage) {
						if q, ok := m.(*pgproto3.Query); ok && strings.HasPrefix(q.String, "LISTEN") && tt.name == "another backend" {
							if _, err := other.Exec(t.Context(), "BEGIN").ReadAll(); err != nil {
								t.Error(err)
							}
						}
						w.toServer(m)
					}
				case 2: // B
					w.greets(fakePID)
					return fmt.Sprintf("%s:%d", s.Host(), s.Port())
				}
				return ""
			})
			v := mustBe(t, Transaction, dsn)
			if !strings.Contains(v.Evidence, tt.evidence) {
				t.Errorf("the evidence is %q", v.Evidence)
			}
			if other.TxStatus() == 'T' {
				exec(t, other, "COMMIT")
			}
			other.Close(t.Context())
			asBefore(t, s, db, pooled)
		})
	}
	pgtest.Eventually(t, unhindered, "the pooler has no client left", func() bool {
		clients, err := b.Console("SHOW CLIENTS")
		return err == nil && len(clients) == 1 // the console itself
	})
}

// asBefore fails the test if the probes have left anything in the database but
// clean, idle backends of the pools at the DSNs.
func asBefore(tb testing.TB, s *pgtest.Server, db string, pools ...string) {
	tb.Helper()
	o := connect(tb, s.DSN(db))
	const others = " FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
	pgtest.Eventually(tb, unhindered, "no connection is left but the poolers'", func() bool {
		return exec(tb, o, "SELECT count(*)"+others+" AND usename NOT LIKE 'app%'")[0][0] == "0"
	})
	for _, row := range exec(tb, o, "SELECT pid, state, query"+others+" AND state <> 'idle'") {
		tb.Errorf("a backend is not idle: %s", row)
	}
	unmet := map[string]bool{}
	for _, row := range exec(tb, o, "SELECT pid"+others) {
		unmet[row[0]] = true
	}
	tb.Logf("%d backends", len(unmet))

	// To meet all backends of a pool, ask it many questions at once.
	var mu sync.Mutex
	pgtest.Eventually(tb, unhindered, "all backends are met", func() bool {
		var wg sync.WaitGroup
		for _, dsn := range pools {
			for range 10 {
				c := connect(tb, dsn)
				wg.Go(func() {
					defer c.Close(context.Background())
					results, err := c.Exec(context.Background(), "SELECT pg_backend_pid(), (SELECT string_agg(statement, '; ') FROM pg_prepared_statements), "+
						"(SELECT string_agg(l, ', ') FROM pg_listening_channels() AS l), pg_sleep(0.05)").ReadAll()
					if err != nil {
						tb.Error(err)
						return
					}
					row := results[0].Rows[0]
					if len(row[1]) > 0 || len(row[2]) > 0 {
						tb.Errorf("backend %s has prepared %q and listens to %q", row[0], row[1], row[2])
					}
					mu.Lock()
					delete(unmet, string(row[0]))
					mu.Unlock()
				})
			}
		}
		wg.Wait()
		return len(unmet) == 0
	})
}
