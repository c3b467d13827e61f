package poolmode

import (
	"context"
	"errors"
	"fmt"
	"net"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/pgadvlock/pgadvlock/internal/pgtest"
)

// Whatever goes wrong, the verdict is true or unknown, comes in time, and leaves
// no goroutine.

// unhindered bounds what should take a second or two, on a machine that has much else to do.
const unhindered = 10 * time.Second

// inTime fails the test if a probe took longer than its patience can last.
func inTime(tb testing.TB, first First, took time.Duration) {
	tb.Helper()
	bound := 2*connectFloor + 2*stepsFloor + firstWindow + secondWindow + // as Probe says
		4*stepsTrips*first.RoundTrip + 2*time.Second // the machine's share
	if took > bound {
		tb.Errorf("the probe took %s", took)
	}
}

// noneLeft fails the test if a goroutine of a probe, or of pgconn's for it, runs now.
func noneLeft(tb testing.TB) {
	tb.Helper()
	buf := make([]byte, 1<<20)
	stacks := string(buf[:runtime.Stack(buf, true)])
	for _, frame := range []string{"poolmode.take", "poolmode.(*conn)", "poolmode.(*probe)", "asyncClose"} {
		if strings.Contains(stacks, frame) {
			tb.Errorf("a goroutine is left in %s:\n%s", frame, stacks)
		}
	}
}

// counting is a dialer that says how many of its sockets are open.
func counting(dsn string) (dial func(context.Context) (*pgconn.PgConn, error), open func() int) {
	var n atomic.Int64
	dial = func(ctx context.Context) (*pgconn.PgConn, error) {
		config, err := pgconn.ParseConfig(dsn)
		if err != nil {
			return nil, err
		}
		forReal := config.DialFunc
		config.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
			c, err := forReal(ctx, network, address)
			if err != nil {
				return nil, err
			}
			n.Add(1)
			return &countedSocket{Conn: c, closed: sync.OnceFunc(func() { n.Add(-1) })}, nil
		}
		return pgconn.ConnectConfig(ctx, config)
	}
	return dial, func() int { return int(n.Load()) }
}

type countedSocket struct {
	net.Conn
	closed func()
}

func (s *countedSocket) Close() error {
	s.closed()
	return s.Conn.Close()
}

func TestSessionPoolExhausted(t *testing.T) {
	s := pgtest.Shared(t)
	db := s.NewDB(t)
	for _, tt := range []struct {
		size     int
		evidence string
	}{
		{1, "greeted, but not answered"}, // the caller's own connection has the only backend
		{2, "one is answered while another waits"},
	} {
		t.Run(fmt.Sprintf("pool of %d", tt.size), func(t *testing.T) {
			b := s.Bouncer(t, fmt.Sprintf("default_pool_size=%d", tt.size))
			noLeaks(t)
			dsn := b.DSN(db, "session")
			c := connect(t, dsn)
			first := ask(t, c)
			begin := time.Now()
			v := Probe(t.Context(), first, dialer(dsn))
			took := time.Since(begin)
			noneLeft(t)
			t.Logf("%s in %s, %d round trips: %s", v.Mode, took, v.RoundTrips, v.Evidence)
			if v.Mode != Unknown || !strings.Contains(v.Evidence, "no second connection free") || !strings.Contains(v.Evidence, tt.evidence) {
				t.Errorf("the verdict is %q: %s", v.Mode, v.Evidence)
			}
			inTime(t, first, took)
			exec(t, c, "SELECT 1")
			c.Close(t.Context())
			pgtest.Eventually(t, unhindered, "PgBouncer has no client left", func() bool {
				rows, err := b.Console("SHOW CLIENTS")
				return err == nil && len(rows) == 1 // the console itself
			})
			c = connect(t, dsn)
			exec(t, c, "SELECT 1") // the pool is none the worse
		})
	}
}

// In a transaction the caller may hold the only backend of its pool.
func TestCallerHoldsThePool(t *testing.T) {
	s := pgtest.Shared(t)
	b := s.Bouncer(t, "default_pool_size=1")
	noLeaks(t)
	dsn := b.DSN(s.NewDB(t), "transaction")
	c := connect(t, dsn)
	exec(t, c, "BEGIN")
	v := Probe(t.Context(), ask(t, c), dialer(dsn))
	if v.Mode != Unknown || !strings.Contains(v.Evidence, "no second connection free") {
		t.Errorf("the verdict is %q: %s", v.Mode, v.Evidence)
	}
	if c.TxStatus() != 'T' {
		t.Errorf("the caller's transaction is %q", c.TxStatus())
	}
	exec(t, c, "COMMIT")
}

func TestConnectionsRefused(t *testing.T) {
	s := pgtest.Shared(t)
	db := s.NewDB(t)
	for _, allowed := range []int{1, 2} { // the caller's, and perhaps one of the probe's
		t.Run(fmt.Sprintf("max_client_conn=%d", allowed), func(t *testing.T) {
			var first First
			b := s.Bouncer(t, fmt.Sprintf("max_client_conn=%d", allowed))
			noLeaks(t)
			dsn := b.DSN(db, "session")
			pgtest.Eventually(t, unhindered, "whoever saw PgBouncer start is gone", func() bool {
				c, err := pgconn.Connect(t.Context(), dsn)
				if err != nil {
					return false
				}
				t.Cleanup(func() { c.Close(context.Background()) })
				first = ask(t, c)
				return true
			})
			v := Probe(t.Context(), first, dialer(dsn))
			if v.Mode != Unknown || !strings.Contains(v.Evidence, "no more connections allowed") {
				t.Errorf("the evidence is %q", v.Evidence)
			}
		})
		t.Run(fmt.Sprintf("connection limit of %d", allowed), func(t *testing.T) {
			noLeaks(t)
			role := fmt.Sprintf("limited%d", allowed)
			if err := s.Exec(db, fmt.Sprintf("CREATE ROLE %s LOGIN CONNECTION LIMIT %d", role, allowed)); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { s.Exec(db, "DROP ROLE "+role) })
			dsn := far(t, strings.Replace(s.DSN(db), "postgres@", role+"@", 1), 0)
			v := mustBe(t, Unknown, dsn)
			if !strings.Contains(v.Evidence, "too many connections") {
				t.Errorf("the evidence is %q", v.Evidence)
			}
		})
	}
}

// PgBouncer dies or hangs, before or after the probe gets its first or second connection.
func TestPgBouncerEnds(t *testing.T) {
	s := pgtest.Shared(t)
	db := s.NewDB(t)
	for name, strike := range map[string]func(*testing.T, *pgtest.Bouncer){
		"killed": func(t *testing.T, b *pgtest.Bouncer) { b.Kill() },
		"frozen": func(t *testing.T, b *pgtest.Bouncer) { pgtest.Freeze(t, b.PID()) },
	} {
		for nth := 1; nth <= 2; nth++ {
			for _, when := range []string{"before", "after"} {
				if name == "frozen" && when == "before" && nth == 1 {
					continue // a second's wait as before connection 2
				}
				t.Run(fmt.Sprintf("%s %s connection %d", name, when, nth), func(t *testing.T) {
					b := s.Bouncer(t)
					noLeaks(t)
					dsn := b.DSN(db, "transaction")
					first := ask(t, connect(t, dsn))
					dials := 0
					begin := time.Now()
					v := Probe(t.Context(), first, func(ctx context.Context) (*pgconn.PgConn, error) {
						dials++
						if dials == nth && when == "before" {
							strike(t, b)
						}
						pg, err := pgconn.Connect(ctx, dsn)
						if dials == nth && when == "after" {
							strike(t, b)
						}
						return pg, err
					})
					took := time.Since(begin)
					t.Logf("%s in %s: %s", v.Mode, took, v.Evidence)
					if v.Mode != Unknown {
						t.Errorf("the mode is %q: %s", v.Mode, v.Evidence)
					}
					inTime(t, first, took)
				})
			}
		}
	}
}

// strikeAt is a proxy that does something to a wire when the probe sends the nth of
// its messages, and passes none on from there. It says whether it came to that.
func strikeAt(tb testing.TB, dsn string, nth int64, strike func(*wire)) (through string, struck func() bool) {
	var sent atomic.Int64
	through = proxy(tb, dsn, func(_ int, w *wire) string {
		w.fromClient = func(m pgproto3.FrontendMessage) {
			switch n := sent.Add(1); {
			case n < nth:
				w.toServer(m)
			case n == nth:
				strike(w)
			}
		}
		return ""
	})
	return through, func() bool { return sent.Load() >= nth }
}

// At each point of its way, one of the probe's connections breaks, the network
// falls silent, or ctx ends.
func TestInterrupted(t *testing.T) {
	s := pgtest.Shared(t)
	s.RequireBouncer(t)
	db := s.NewDB(t)
	for _, tt := range []struct {
		name string
		step int64 // from point to point: silence takes its time
	}{{"broken", 1}, {"canceled", 1}, {"silent", 6}} {
		for _, mode := range []Mode{Session, Transaction, Statement} {
			t.Run(fmt.Sprintf("%s, %s", tt.name, mode), func(t *testing.T) {
				noLeaks(t)
				behind := s.BouncerDSN(db, mode.String())
				first := ask(t, connect(t, behind))
				if tt.name == "canceled" {
					first.RoundTrip = time.Second // more patience than the test has
				}
				for nth := int64(1); ; nth += tt.step {
					ctx, cancel := context.WithCancel(t.Context())
					var canceled atomic.Int64
					through, struck := strikeAt(t, behind, nth, func(w *wire) {
						switch tt.name {
						case "broken":
							w.hangUp()
						case "canceled":
							canceled.Store(time.Now().UnixNano())
							cancel()
						}
					})
					begin := time.Now()
					dial, open := counting(through)
					v := Probe(ctx, first, dial)
					end := time.Now()
					noneLeft(t)
					if n := open(); n != 0 {
						t.Errorf("message %d %s: %d sockets are still open", nth, tt.name, n)
					}
					cancel()
					if v.Mode != Unknown && v.Mode != mode && !(mode == Statement && v.Mode == Transaction) {
						t.Errorf("message %d %s: the mode is %q: %s", nth, tt.name, v.Mode, v.Evidence)
					}
					inTime(t, first, end.Sub(begin))
					if !struck() {
						if v.Mode != mode {
							t.Errorf("uninterrupted, the mode is %q: %s", v.Mode, v.Evidence)
						}
						return
					}
					if v.Mode == Unknown && tt.name == "canceled" && !strings.Contains(v.Evidence, "context canceled") {
						t.Errorf("message %d: the evidence is %q", nth, v.Evidence)
					}
					if took := end.Sub(time.Unix(0, canceled.Load())); tt.name == "canceled" && took > time.Second {
						t.Errorf("message %d: it went on for %s", nth, took)
					}
				}
			})
		}
	}
}

func TestContextEndedBefore(t *testing.T) {
	noLeaks(t)
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("enough"))
	v := Probe(ctx, First{BackendPID: 1}, dialer("postgres://nobody@127.0.0.1:1/none"))
	if v.Mode != Unknown || !strings.Contains(v.Evidence, "enough") {
		t.Errorf("the verdict is %q: %s", v.Mode, v.Evidence)
	}
}

// C's backend is stopped when B notifies. A session's own backend tells late, but it does.
func TestBackendStops(t *testing.T) {
	s := pgtest.Shared(t)
	if s.External() {
		t.Skip("the backends must be of this machine")
	}
	db := s.NewDB(t)
	for _, tt := range []struct {
		name string
		wake bool
		want Mode
	}{{"for a while", true, Session}, {"for good", false, Unknown}} {
		t.Run(tt.name, func(t *testing.T) {
			var mu sync.Mutex
			var c int // the pid of C's backend
			var stop sync.Once
			mustBe(t, tt.want, proxy(t, s.DSN(db), func(n int, w *wire) string {
				w.fromServer = func(m pgproto3.BackendMessage) {
					if key, ok := m.(*pgproto3.BackendKeyData); ok {
						if n == 1 { // the caller's is 0, B's 2
							mu.Lock()
							c = int(key.ProcessID)
							mu.Unlock()
						}
						key.ProcessID = fakePID
					}
					w.toClient(m)
				}
				w.fromClient = func(m pgproto3.FrontendMessage) {
					if q, ok := m.(*pgproto3.Query); ok && strings.Contains(q.String, "NOTIFY") {
						stop.Do(func() {
							mu.Lock()
							defer mu.Unlock()
							thaw := pgtest.Freeze(t, c)
							if tt.wake {
								time.AfterFunc(firstWindow+50*time.Millisecond, thaw)
							}
						})
					}
					w.toServer(m)
				}
				return ""
			}))
		})
	}
}
