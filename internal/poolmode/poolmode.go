// Package poolmode finds out what stands between a client connection and its
// backend: nothing, or a pooler, and whether that pooler leaves a client with one
// backend (session pooling) or moves it between transactions or statements.
//
// It works over connections handed to it, and knows nothing of database/sql, of
// rules and of caches.
//
// [Ask] costs one round trip on the caller's own connection and settles the
// common case. Where it does not, [Probe] experiments on two connections of its
// own. Pooling is a verdict on positive evidence only, and so is session pooling:
// whatever fails, stays silent or does not add up is [Unknown].
package poolmode

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// Mode is what stands between a client connection and its backend.
type Mode uint8

const (
	Unknown     Mode = iota // not proven either way
	Direct                  // no pooler: the connection is the backend's own
	Session                 // a pooler that leaves a client with one backend
	Transaction             // a pooler that may change the backend after each transaction
	Statement               // a pooler that may change the backend after each statement, and refuses transactions
)

// String is the mode in the words of PgBouncer's pool_mode: "unknown", "direct",
// "session", "transaction" or "statement".
func (m Mode) String() string {
	switch m {
	case Unknown:
		return "unknown"
	case Direct:
		return "direct"
	case Session:
		return "session"
	case Transaction:
		return "transaction"
	case Statement:
		return "statement"
	}
	return "mode " + strconv.Itoa(int(m))
}

// First is what one question on the caller's own connection shows.
type First struct {
	BackendPID uint32        // of the backend that answered
	SamePID    bool          // it is the one that the server's greeting named
	Direct     bool          // and its client's port is our own: nobody is in between
	RoundTrip  time.Duration // what the question took: the measure of all patience in Probe
}

// firstQuestion must be harmless wherever the caller's connection is: it reads no
// table, and takes the simple protocol because that leaves prepared statements
// and portals alone. Names are qualified against a hostile search_path.
const firstQuestion = "SELECT pg_catalog.pg_backend_pid(), pg_catalog.inet_client_port()"

// Ask asks the backend who it is and compares that with what the connection knows:
// the process that greeted it (BackendKeyData), and its own end of the socket. A
// pooler greets with a number of its own making and has sockets of its own.
// It costs one round trip and may be used inside a transaction.
//
// SamePID without Direct is somebody who forwards bytes (NAT, a TCP proxy), a
// pooler that forwards the backend's key (pgpool-II), or a pooler whose numbers
// are counters (Supavisor, PgDog): [Probe] tells them apart.
//
// also are expressions that the caller wants to have evaluated on the way.
func Ask(ctx context.Context, c *pgconn.PgConn, also ...string) (First, error) {
	begin := time.Now()
	results, err := c.Exec(ctx, strings.Join(append([]string{firstQuestion}, also...), ", ")).ReadAll()
	if err != nil {
		return First{}, fmt.Errorf("poolmode: asking the backend who it is: %w", err)
	}
	first := First{RoundTrip: time.Since(begin)}
	if len(results) != 1 || len(results[0].Rows) != 1 || len(results[0].Rows[0]) != 2+len(also) {
		return First{}, errors.New("poolmode: asking the backend who it is: the answer is not one row of as many columns")
	}
	row := results[0].Rows[0]
	if first.BackendPID, err = parsePID(string(row[0])); err != nil {
		return First{}, err
	}
	first.SamePID = first.BackendPID == c.PID()
	first.Direct = first.SamePID && samePort(c.Conn(), row[1])
	return first, nil
}

// parsePID reads a pid, which PostgreSQL shows as a signed and sends as an unsigned number.
func parsePID(text string) (uint32, error) {
	pid, err := strconv.ParseInt(text, 10, 32)
	if err != nil {
		return 0, fmt.Errorf("poolmode: backend pid: %w", err)
	}
	return uint32(pid), nil
}

// samePort says whether the port that the backend sees is our end of the socket.
// The port of a Unix socket is null.
func samePort(c net.Conn, port []byte) bool {
	switch local := c.LocalAddr().(type) {
	case *net.TCPAddr:
		return string(port) == strconv.Itoa(local.Port)
	case *net.UnixAddr:
		return port == nil
	}
	return false
}

// Verdict is what Probe found.
type Verdict struct {
	Mode       Mode
	Evidence   string // for people; where the mode is unknown, why it is
	RoundTrips int    // waits for an answer: Probe's connects and questions, not Ask's
}
