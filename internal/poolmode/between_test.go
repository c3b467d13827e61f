package poolmode

import (
	"context"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/pgadvlock/pgadvlock/internal/pgtest"
)

// What may be between a client and its backend besides PgBouncer.

func TestLatency(t *testing.T) {
	s := pgtest.Shared(t)
	s.RequireBouncer(t)
	db := s.NewDB(t)
	for _, added := range []time.Duration{30 * time.Millisecond, 80 * time.Millisecond} {
		for _, tt := range []struct {
			mode Mode
			dsn  string
		}{
			{Direct, s.DSN(db)},
			{Session, s.BouncerDSN(db, "session")},
			{Transaction, s.BouncerDSN(db, "transaction")},
		} {
			t.Run(fmt.Sprintf("%s, %s", tt.mode, added), func(t *testing.T) {
				t.Parallel()
				mustBe(t, tt.mode, far(t, tt.dsn, added))
			})
		}
	}
}

func TestTLS(t *testing.T) {
	s := pgtest.Shared(t)
	s.RequireBouncer(t)
	noLeaks(t)
	db := s.NewDB(t)
	mustBe(t, Direct, encrypted(t, s.DSN(db)))
	mustBe(t, Session, encrypted(t, s.BouncerDSN(db, "session")))
	mustBe(t, Transaction, encrypted(t, s.BouncerDSN(db, "transaction")))
}

// NAT and TCP proxies leave the greeting as it is and change the port.
func TestNAT(t *testing.T) {
	s := pgtest.Shared(t)
	dsn := far(t, s.DSN(s.NewDB(t)), 0)
	first := ask(t, connect(t, dsn))
	if !first.SamePID || first.Direct {
		t.Fatalf("the first answer is %+v, want the same pid and another port", first)
	}
	v := mustBe(t, Direct, dsn)
	if !strings.Contains(v.Evidence, "three connections") {
		t.Errorf("the evidence is %q", v.Evidence)
	}
}

// Some poolers greet with the number of the client. It can be a backend's pid too.
func TestPIDsOfACounter(t *testing.T) {
	s := pgtest.Shared(t)
	s.RequireBouncer(t)
	db := s.NewDB(t)
	for _, mode := range []Mode{Transaction, Session} {
		behind := s.BouncerDSN(db, mode.String())
		t.Run(mode.String(), func(t *testing.T) {
			c := connect(t, behind) // its backend is the next one's too, behind transaction pooling
			pid, err := parsePID(exec(t, c, "SELECT pg_backend_pid()")[0][0])
			if err != nil {
				t.Fatal(err)
			}
			if mode == Session {
				c.Close(t.Context())
			}
			dsn := proxy(t, behind, func(n int, w *wire) string {
				if n == 0 {
					w.greets(pid)
				} else {
					w.greets(fakePID + uint32(n))
				}
				return ""
			})
			first := ask(t, connect(t, dsn))
			if !first.SamePID || first.Direct {
				t.Fatalf("the first answer is %+v of pid %d, want the same pid", first, pid)
			}
			v := Probe(t.Context(), first, dialer(dsn))
			if v.Mode != mode {
				t.Errorf("the mode is %q, want %q: %s", v.Mode, mode, v.Evidence)
			}
		})
	}
	t.Run("all alike", func(t *testing.T) { // three greetings agree with one backend
		behind := s.BouncerDSN(db, "transaction")
		pid, err := parsePID(exec(t, connect(t, behind), "SELECT pg_backend_pid()")[0][0])
		if err != nil {
			t.Fatal(err)
		}
		mustBe(t, Transaction, proxy(t, behind, func(n int, w *wire) string {
			w.greets(pid)
			return ""
		}))
	})
}

// renames gives prepared statements names of its own, as poolers do that share them.
func renames(prefix string) func(int, *wire) string {
	var mu sync.Mutex
	names := map[string]string{"": ""}
	return func(n int, w *wire) string {
		name := func(client string) string {
			mu.Lock()
			defer mu.Unlock()
			if _, ok := names[client]; !ok {
				names[client] = prefix + strconv.Itoa(len(names))
			}
			return names[client]
		}
		w.fromClient = func(m pgproto3.FrontendMessage) {
			switch m := m.(type) {
			case *pgproto3.Parse:
				m.Name = name(m.Name)
			case *pgproto3.Bind:
				m.PreparedStatement = name(m.PreparedStatement)
			case *pgproto3.Close:
				m.Name = name(m.Name)
			}
			w.toServer(m)
		}
		w.greets(fakePID + uint32(n))
		return ""
	}
}

func TestRenamedPreparedStatements(t *testing.T) {
	s := pgtest.Shared(t)
	s.RequireBouncer(t)
	db := s.NewDB(t)
	v := mustBe(t, Transaction, proxy(t, s.BouncerDSN(db, "transaction"), renames("PGBOUNCER_")))
	if !strings.Contains(v.Evidence, "renamed to PGBOUNCER_1") || v.RoundTrips != 3 {
		t.Errorf("the evidence is %q in %d round trips, want the name in 3", v.Evidence, v.RoundTrips)
	}
	v = mustBe(t, Statement, proxy(t, s.BouncerDSN(db, "statement"), renames("PGBOUNCER_")))
	if !strings.Contains(v.Evidence, "renamed to PGBOUNCER_1") {
		t.Errorf("the evidence is %q, want the name", v.Evidence)
	}
	// What others rename, and in which of their modes, nobody has shown.
	mustBe(t, Session, proxy(t, s.DSN(db), renames("other_")))
}

// Two servers behind one address, and a backend on each with the same pid: what
// one says of the other's backend is no evidence.
func TestTwoServers(t *testing.T) {
	one, two := pgtest.Shared(t), pgtest.Private(t)
	if one.External() {
		t.Skip("the two servers must have the same roles")
	}
	dsn := one.DSN("postgres")
	bystander := map[string]string{} // another backend of each server
	for _, s := range []*pgtest.Server{one, two} {
		c := connect(t, s.DSN("postgres"))
		bystander[s.DSN("postgres")] = exec(t, c, "SELECT pg_backend_pid()")[0][0]
	}
	address := func(s *pgtest.Server) string { return fmt.Sprintf("%s:%d", s.Host(), s.Port()) }
	dsn = proxy(t, dsn, func(n int, w *wire) string {
		server := []*pgtest.Server{one, two}[n%2]
		const common = 4711
		var real uint32
		w.fromServer = func(m pgproto3.BackendMessage) {
			switch m := m.(type) {
			case *pgproto3.BackendKeyData:
				real, m.ProcessID = m.ProcessID, fakePID+uint32(n)
			case *pgproto3.NotificationResponse:
				m.PID = common
			case *pgproto3.DataRow:
				for i, v := range m.Values {
					if string(v) == strconv.Itoa(int(real)) {
						m.Values[i] = []byte(strconv.Itoa(common))
					}
				}
			}
			w.toClient(m)
		}
		w.fromClient = func(m pgproto3.FrontendMessage) {
			if q, ok := m.(*pgproto3.Query); ok {
				q.String = strings.ReplaceAll(q.String, fmt.Sprintf("pg_stat_get_activity(%d)", common),
					"pg_stat_get_activity("+bystander[server.DSN("postgres")]+")")
			}
			w.toServer(m)
		}
		return address(server)
	})
	v := mustBe(t, Unknown, dsn)
	if !strings.Contains(v.Evidence, "different servers") {
		t.Errorf("the evidence is %q", v.Evidence)
	}
}

// Somebody else's statement on C's backend is evidence, whoever it is and wherever B is.
func TestBackendUsedByOthers(t *testing.T) {
	s := pgtest.Shared(t)
	var c *wire
	var others atomic.Bool // whoever is at work on C's backend
	done := make(chan struct{}, 1)
	v := mustBe(t, Transaction, proxy(t, s.DSN(s.NewDB(t)), func(n int, w *wire) string {
		switch n {
		case 1:
			c = w
			w.fromServer = func(m pgproto3.BackendMessage) {
				if !others.Load() {
					w.toClient(m)
				} else if _, ok := m.(*pgproto3.ReadyForQuery); ok {
					others.Store(false)
					done <- struct{}{}
				}
			}
		case 2:
			w.fromClient = func(m pgproto3.FrontendMessage) {
				if _, ok := m.(*pgproto3.Query); ok {
					others.Store(true)
					c.toServer(&pgproto3.Query{String: "SELECT 'somebody else'"})
					<-done
				}
				w.toServer(m)
			}
		}
		w.greets(fakePID + uint32(n))
		return ""
	}))
	if !strings.Contains(v.Evidence, "used by somebody else") {
		t.Errorf("the evidence is %q", v.Evidence)
	}
}

// A proxy may hold back what the server sends on its own account until it sends
// an answer. It can still leave each client its backend: such a silence is no proof.
func TestNotificationsHeldBack(t *testing.T) {
	s := pgtest.Shared(t)
	dsn := proxy(t, s.DSN(s.NewDB(t)), func(n int, w *wire) string {
		var mu sync.Mutex
		var held []pgproto3.BackendMessage
		idle := true
		w.fromClient = func(m pgproto3.FrontendMessage) {
			mu.Lock()
			idle = false
			mu.Unlock()
			w.toServer(m)
		}
		w.fromServer = func(m pgproto3.BackendMessage) {
			mu.Lock()
			defer mu.Unlock()
			switch m := m.(type) {
			case *pgproto3.NotificationResponse:
				if idle {
					held = append(held, &pgproto3.NotificationResponse{PID: m.PID, Channel: m.Channel})
					return
				}
			case *pgproto3.ReadyForQuery:
				w.toClient(held...)
				held, idle = nil, true
			}
			w.toClient(m)
		}
		w.greets(fakePID + uint32(n))
		return ""
	})
	v := mustBe(t, Unknown, dsn)
	if !strings.Contains(v.Evidence, "only with an answer") {
		t.Errorf("the evidence is %q", v.Evidence)
	}
}

// A pooler may LISTEN in its clients' stead, as PgDog does (pub_sub_channel_size):
// they hear, and have no backend of their own.
func TestListenOfAProxy(t *testing.T) {
	s := pgtest.Shared(t)
	behind := s.DSN(s.NewDB(t))
	listen := regexp.MustCompile(`LISTEN (\w+); `)
	dsn := proxy(t, behind, func(n int, w *wire) string {
		w.fromClient = func(m pgproto3.FrontendMessage) {
			if q, ok := m.(*pgproto3.Query); ok {
				for _, match := range listen.FindAllStringSubmatch(q.String, -1) {
					listenFor(t, behind, match[1], func(n *pgconn.Notification) {
						w.toClient(&pgproto3.NotificationResponse{PID: n.PID, Channel: n.Channel})
					})
				}
				q.String = listen.ReplaceAllString(q.String, "")
			}
			w.toServer(m)
		}
		w.greets(fakePID + uint32(n))
		return ""
	})
	v := mustBe(t, Unknown, dsn)
	if !strings.Contains(v.Evidence, "a proxy that LISTENs") {
		t.Errorf("the evidence is %q", v.Evidence)
	}
}

// Notifications that get lost, or come from elsewhere, prove nothing either.
func TestNotificationsMeddledWith(t *testing.T) {
	s := pgtest.Shared(t)
	dsn := s.DSN(s.NewDB(t))
	for _, tt := range []struct {
		name     string
		meddle   func(n int, w *wire)
		evidence string
	}{
		{"lost", func(n int, w *wire) {
			w.fromClient = func(m pgproto3.FrontendMessage) {
				if q, ok := m.(*pgproto3.Query); ok {
					q.String = regexp.MustCompile(` NOTIFY \w+;`).ReplaceAllString(q.String, "")
				}
				w.toServer(m)
			}
		}, "did not come back to its sender"},
		{"from elsewhere", func(n int, w *wire) {
			w.fromServer = func(m pgproto3.BackendMessage) {
				if notification, ok := m.(*pgproto3.NotificationResponse); ok && n == 1 { // the caller's is 0, B's 2
					notification.PID = fakePID
				}
				w.toClient(m)
			}
		}, "came from"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			v := mustBe(t, Unknown, proxy(t, dsn, func(n int, w *wire) string {
				tt.meddle(n, w)
				w.greets(fakePID + uint32(n))
				return ""
			}))
			if !strings.Contains(v.Evidence, tt.evidence) {
				t.Errorf("the evidence is %q", v.Evidence)
			}
		})
	}
}

// listenFor listens to a channel on a connection of its own, until the test ends.
func listenFor(tb testing.TB, dsn, channel string, heard func(*pgconn.Notification)) {
	config, err := pgconn.ParseConfig(dsn)
	if err != nil {
		tb.Error(err)
		return
	}
	config.OnNotification = func(_ *pgconn.PgConn, n *pgconn.Notification) { heard(n) }
	ctx, cancel := context.WithCancel(context.Background())
	c, err := pgconn.ConnectConfig(ctx, config)
	if err == nil {
		_, err = c.Exec(ctx, "LISTEN "+channel).ReadAll()
	}
	if err != nil {
		cancel()
		tb.Error(err)
		return
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for c.WaitForNotification(ctx) == nil {
		}
	}()
	tb.Cleanup(func() {
		cancel()
		<-done
		c.Close(context.Background())
	})
}
