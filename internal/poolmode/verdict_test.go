package poolmode

import (
	"fmt"
	"testing"

	"github.com/pgadvlock/pgadvlock/internal/pgtest"
)

// Every mode is told from every other, through small and large pools, idle and busy.
func TestVerdicts(t *testing.T) {
	s := pgtest.Shared(t)
	db := s.NewDB(t)
	trips := map[Mode]int{Direct: 0, Session: 14, Transaction: 6, Statement: 6} // at most, where nobody else is at work
	run := func(name string, want Mode, dsn string, clients int) {
		t.Run(name, func(t *testing.T) {
			if clients > 0 {
				t.Parallel() // these wait most of the time
				defer busy(t, dsn, clients, want != Statement)()
			}
			var result table
			for range probes(t) {
				v, took := probeOnce(t, dsn)
				result.add(v, took)
				if v.Mode != want {
					t.Errorf("the mode is %q, want %q: %s", v.Mode, want, v.Evidence)
				}
				if clients == 0 && v.RoundTrips > trips[want] {
					t.Errorf("it took %d round trips, want at most %d: %s", v.RoundTrips, trips[want], v.Evidence)
				}
			}
			t.Logf("%-36s %s", name, &result)
		})
	}
	run("direct", Direct, s.DSN(db), 0)
	if dsn := s.SocketDSN(db); dsn != "" {
		run("direct through a socket", Direct, dsn, 0)
	}
	for _, size := range []int{1, 2, 20} {
		b := s.Bouncer(t, fmt.Sprintf("default_pool_size=%d", size))
		for _, clients := range []int{0, 20} {
			load := map[int]string{0: "idle", 20: "busy"}[clients]
			run(fmt.Sprintf("transaction, pool of %d, %s", size, load), Transaction, b.DSN(db, "transaction"), clients)
			run(fmt.Sprintf("statement, pool of %d, %s", size, load), Statement, b.DSN(db, "statement"), clients)
		}
	}
	b := s.Bouncer(t, "default_pool_size=25")
	run("session, idle", Session, b.DSN(db, "session"), 0)
	run("session, busy", Session, b.DSN(db, "session"), 20)
}
