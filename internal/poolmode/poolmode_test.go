package poolmode

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/pgadvlock/pgadvlock/internal/pgtest"
	"go.uber.org/goleak"
)

// probes is how many fresh probes a statistical test makes of each kind:
// PGADVLOCK_TEST_PROBES, else 10.
func probes(tb testing.TB) int {
	text := os.Getenv("PGADVLOCK_TEST_PROBES")
	if text == "" {
		return 10
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		tb.Fatalf("PGADVLOCK_TEST_PROBES: %v", err)
	}
	return n
}

// noLeaks fails the test if a goroutine is left when all else of it is cleaned up.
// It goes first in a test.
func noLeaks(tb testing.TB) {
	running := goleak.IgnoreCurrent()
	tb.Cleanup(func() { goleak.VerifyNone(tb, running) })
}

// dialer makes connections as a caller does for Probe.
func dialer(dsn string) func(context.Context) (*pgconn.PgConn, error) {
	return func(ctx context.Context) (*pgconn.PgConn, error) { return pgconn.Connect(ctx, dsn) }
}

// connect is a connection of a caller's, until the test ends.
func connect(tb testing.TB, dsn string) *pgconn.PgConn {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	c, err := pgconn.Connect(ctx, dsn)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { c.Close(context.Background()) })
	return c
}

// exec runs statements, and returns the rows of the last one.
func exec(tb testing.TB, c *pgconn.PgConn, sql string) [][]string {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	results, err := c.Exec(ctx, sql).ReadAll()
	if err != nil {
		tb.Fatalf("%s: %v", sql, err)
	}
	var rows [][]string
	for _, values := range results[len(results)-1].Rows {
		var row []string
		for _, v := range values {
			row = append(row, string(v))
		}
		rows = append(rows, row)
	}
	return rows
}

func ask(tb testing.TB, c *pgconn.PgConn) First {
	tb.Helper()
	first, err := Ask(context.Background(), c)
	if err != nil {
		tb.Fatal(err)
	}
	return first
}

// probeOnce is what a program does: a connection of its own, then Ask, then Probe.
func probeOnce(tb testing.TB, dsn string) (Verdict, time.Duration) {
	tb.Helper()
	ctx := context.Background()
	c, err := pgconn.Connect(ctx, dsn)
	if err != nil {
		tb.Fatal(err)
	}
	defer c.Close(ctx)
	begin := time.Now()
	v := Probe(ctx, ask(tb, c), dialer(dsn))
	return v, time.Since(begin)
}

// mustBe probes once more and wants that mode.
func mustBe(tb testing.TB, want Mode, dsn string) Verdict {
	tb.Helper()
	v, took := probeOnce(tb, dsn)
	tb.Logf("%s in %s, %d round trips: %s", v.Mode, took, v.RoundTrips, v.Evidence)
	if v.Mode != want {
		tb.Errorf("the mode is %q, want %q: %s", v.Mode, want, v.Evidence)
	}
	return v
}

// busy keeps n clients working through a pooler until stopped, each of them half of
// the time: with short statements, and transactions where the mode allows them.
func busy(tb testing.TB, dsn string, n int, transactions bool) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for range n {
		c := connect(tb, dsn)
		wg.Go(func() {
			for ctx.Err() == nil {
				sql := "SELECT pg_sleep(0.0005)"
				if transactions && rand.IntN(2) == 0 {
					sql = "BEGIN; SELECT 1; SELECT pg_sleep(0.001); COMMIT"
				}
				if _, err := c.Exec(context.Background(), sql).ReadAll(); err != nil {
					tb.Error(err)
					return
				}
				time.Sleep(time.Duration(rand.IntN(2000)) * time.Microsecond)
			}
		})
	}
	return func() { cancel(); wg.Wait() }
}

// table collects verdicts.
type table struct {
	modes      map[Mode]int
	took       []time.Duration
	roundTrips int
}

func (t *table) add(v Verdict, took time.Duration) {
	if t.modes == nil {
		t.modes = map[Mode]int{}
	}
	t.modes[v.Mode]++
	t.took = append(t.took, took)
	t.roundTrips += v.RoundTrips
}

func (t *table) String() string {
	slices.Sort(t.took)
	at := func(p float64) string {
		return fmt.Sprintf("%.1f ms", t.took[int(p*float64(len(t.took)-1))].Seconds()*1000)
	}
	return fmt.Sprintf("%-18s round trips %4.1f  p50 %8s  p95 %8s  max %8s", fmt.Sprint(t.modes)[len("map"):],
		float64(t.roundTrips)/float64(len(t.took)), at(.5), at(.95), at(1))
}

func TestModeString(t *testing.T) {
	for mode, want := range map[Mode]string{
		Unknown: "unknown", Direct: "direct", Session: "session", Transaction: "transaction", Statement: "statement", 9: "mode 9",
	} {
		if got := mode.String(); got != want {
			t.Errorf("Mode(%d) is %q, want %q", uint8(mode), got, want)
		}
	}
}

// Ask is harmless wherever the caller's connection is, and says what it finds there.
func TestAsk(t *testing.T) {
	s := pgtest.Shared(t)
	ctx := t.Context()
	c := connect(t, s.DSN(s.NewDB(t)))
	first := ask(t, c)
	if !first.Direct || !first.SamePID || first.BackendPID != c.PID() || first.RoundTrip <= 0 {
		t.Errorf("the answer is %+v on the connection of %d", first, c.PID())
	}

	exec(t, c, "BEGIN; CREATE TABLE t(); SAVEPOINT s")
	if first = ask(t, c); !first.Direct || c.TxStatus() != 'T' {
		t.Errorf("in a transaction, the answer is %+v and the transaction is %q", first, c.TxStatus())
	}
	exec(t, c, "ROLLBACK TO s; COMMIT; TABLE t")

	exec(t, c, "BEGIN")
	c.Exec(ctx, "SELECT 1/0").ReadAll()
	_, err := Ask(ctx, c)
	if refusal, ok := errors.AsType[*pgconn.PgError](err); !ok || refusal.Code != "25P02" {
		t.Errorf("in a failed transaction, the error is %v", err)
	}
	exec(t, c, "ROLLBACK")

	ended, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := Ask(ended, c); !errors.Is(err, context.Canceled) {
		t.Errorf("with an ended context, the error is %v", err)
	}
	c.Close(ctx)
	if _, err := Ask(ctx, c); err == nil {
		t.Error("a closed connection answers")
	}
}

// A pooler's greeting names no backend.
func TestAskPooler(t *testing.T) {
	s := pgtest.Shared(t)
	s.RequireBouncer(t)
	for _, mode := range []string{"session", "transaction", "statement"} {
		first := ask(t, connect(t, s.BouncerDSN(s.NewDB(t), mode)))
		if first.SamePID || first.Direct || first.BackendPID == 0 {
			t.Errorf("through %s pooling, the answer is %+v", mode, first)
		}
	}
}
