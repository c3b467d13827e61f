package poolmode

import (
	"context"
	"fmt"
	"sync"
	"testing"

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

// The same where it needs step 4 to find transaction pooling: it LISTENs on
// backends that are the pool's.
func TestNoListenLeftBehind(t *testing.T) {
	s := pgtest.Shared(t)
	one := s.Bouncer(t, "so_reuseport=1")
	two := s.Bouncer(t, "so_reuseport=1", fmt.Sprintf("listen_port=%d", one.Port()))
	noLeaks(t)
	db := s.NewDB(t)
	dsn := one.DSN(db, "transaction")
	for range max(4, probes(t)/5) {
		if v, _ := probeOnce(t, dsn); v.Mode != Transaction {
			t.Errorf("the mode is %q: %s", v.Mode, v.Evidence)
		}
	}
	asBefore(t, s, db, dsn)
	for _, b := range []*pgtest.Bouncer{one, two} {
		pgtest.Eventually(t, unhindered, "the pooler has no client left", func() bool {
			clients, err := b.Console("SHOW CLIENTS")
			return err == nil && len(clients) == 1 // the console itself
		})
	}
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
