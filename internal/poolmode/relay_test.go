package poolmode

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"io"
	"math/big"
	"net"
	"net/url"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgproto3"
)

// This file owns stand-ins for what may be between a client and PostgreSQL or
// PgBouncer, and cannot be installed for a test.

// place is a listener that hands each connection to serve, until the test ends.
// It returns the DSN with its own address.
func place(tb testing.TB, dsn string, serve func(client net.Conn, server string)) string {
	tb.Helper()
	u, err := url.Parse(dsn)
	if err != nil {
		tb.Fatal(err)
	}
	server := u.Host
	if server == "" {
		tb.Skipf("%q is not a URL with a host to stand in front of", dsn)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer client.Close()
				serve(client, server)
			})
		}
	})
	tb.Cleanup(func() {
		l.Close()
		wg.Wait() // clients of the test's are closed by then
	})
	u.Host = l.Addr().String()
	return u.String()
}

// far is a way that takes so much longer there and back.
func far(tb testing.TB, dsn string, added time.Duration) string {
	return place(tb, dsn, func(client net.Conn, address string) {
		server, err := net.Dial("tcp", address)
		if err != nil {
			return
		}
		defer server.Close()
		var wg sync.WaitGroup
		wg.Go(func() { slowly(server, client, added/2) })
		slowly(client, server, added/2)
		wg.Wait()
	})
}

// slowly passes bytes on, each of them after the delay, and then the end.
func slowly(to, from net.Conn, delay time.Duration) {
	type bytes struct {
		b   []byte
		due time.Time
	}
	way := make(chan bytes, 1024)
	go func() {
		defer close(way)
		for {
			b := make([]byte, 4096)
			n, err := from.Read(b)
			if n > 0 {
				way <- bytes{b[:n], time.Now().Add(delay)}
			}
			if err != nil {
				return
			}
		}
	}()
	for b := range way {
		time.Sleep(time.Until(b.due))
		to.Write(b.b)
	}
	to.Close()
}

// encrypted is a way that begins with TLS and ends without.
func encrypted(tb testing.TB, dsn string) string {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		tb.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	cert, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		tb.Fatal(err)
	}
	config := &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{cert}, PrivateKey: key}}}
	dsn = place(tb, dsn, func(client net.Conn, address string) {
		if _, err := io.ReadFull(client, make([]byte, 8)); err != nil { // SSLRequest
			return
		}
		client.Write([]byte("S"))
		client = tls.Server(client, config)
		server, err := net.Dial("tcp", address)
		if err != nil {
			return
		}
		defer server.Close()
		var wg sync.WaitGroup
		wg.Go(func() { slowly(server, client, 0) })
		slowly(client, server, 0)
		wg.Wait()
	})
	u, _ := url.Parse(dsn)
	u.RawQuery = "sslmode=require"
	return u.String()
}

// wire is one client's connection through a proxy that reads the protocol. The
// functions see each message and pass it on, changed or not, with the send
// functions; without them everything passes as it is.
type wire struct {
	client *pgproto3.Backend  // towards the client
	server *pgproto3.Frontend // towards the server

	fromClient func(pgproto3.FrontendMessage)
	fromServer func(pgproto3.BackendMessage)
	hangUp     func()

	mu sync.Mutex // of the writers: what comes from the client may be answered at once
}

func (w *wire) toServer(messages ...pgproto3.FrontendMessage) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, m := range messages {
		w.server.Send(m)
	}
	w.server.Flush()
}

func (w *wire) toClient(messages ...pgproto3.BackendMessage) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, m := range messages {
		w.client.Send(m)
	}
	w.client.Flush()
}

// proxy is a proxy that reads the protocol. behave sets what each connection,
// counted from 0, does with messages. It may send a client to another server.
func proxy(tb testing.TB, dsn string, behave func(n int, w *wire) (server string)) string {
	var mu sync.Mutex
	n := 0
	return place(tb, dsn, func(client net.Conn, address string) {
		w := &wire{client: pgproto3.NewBackend(client, client)}
		startup, err := w.client.ReceiveStartupMessage()
		if err != nil {
			return
		}
		if _, ok := startup.(*pgproto3.StartupMessage); !ok {
			return // a CancelRequest: sslmode is disable
		}
		mu.Lock()
		if other := behave(n, w); other != "" {
			address = other
		}
		n++
		mu.Unlock()
		server, err := net.Dial("tcp", address)
		if err != nil {
			return
		}
		defer server.Close()
		w.server = pgproto3.NewFrontend(server, server)
		w.hangUp = func() { client.Close(); server.Close() }
		w.toServer(startup)

		var wg sync.WaitGroup
		wg.Go(func() {
			defer client.Close()
			for {
				m, err := w.server.Receive()
				if err != nil {
					return
				}
				if w.fromServer != nil {
					w.fromServer(m)
				} else {
					w.toClient(m)
				}
			}
		})
		for {
			m, err := w.client.Receive()
			if err != nil {
				break
			}
			if w.fromClient != nil {
				w.fromClient(m)
			} else {
				w.toServer(m)
			}
		}
		server.Close()
		wg.Wait()
	})
}

// greets makes a connection's greeting name that pid.
func (w *wire) greets(pid uint32) {
	pass := w.fromServer
	if pass == nil {
		pass = func(m pgproto3.BackendMessage) { w.toClient(m) }
	}
	w.fromServer = func(m pgproto3.BackendMessage) {
		if key, ok := m.(*pgproto3.BackendKeyData); ok {
			key.ProcessID = pid
		}
		pass(m)
	}
}

// fakePID is none that a backend has: they are below 4194304, Linux's PID_MAX_LIMIT.
const fakePID = 1 << 30
