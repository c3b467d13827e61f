package pgadvlock

// This file owns the question what stands between a connection and its
// backend, and when to ask it.

import (
	"context"
	"fmt"
	"net"
	"strconv"

	"github.com/jackc/pgx/v5/pgconn"
)

// poolMode returns what is known of the connection's road: PoolAuto as long as
// nobody asked.
func (c *Conn) poolMode() PoolMode { return PoolMode(c.mode.Load()) }

// askPoolMode finds out what stands between the connection and its backend,
// once, before the first statement that takes a session lock, or before a
// release. It costs one round trip on the connection itself, which disturbs no
// transaction. A failure is no verdict: the statement that comes next will
// meet the same trouble and report it.
func (c *Conn) askPoolMode(ctx context.Context) {
	if c.poolMode() != PoolAuto {
		return
	}
	if c.pgx == nil {
		c.mode.Store(uint32(PoolUnknown)) // the driver does not show the server's greeting
		return
	}
	pg := c.pgx.PgConn()
	if pg.IsClosed() || pg.IsBusy() || pg.TxStatus() == 'E' {
		return
	}
	results, err := pg.Exec(ctx, "SELECT pg_catalog.pg_backend_pid(), pg_catalog.inet_client_port()").ReadAll()
	if err != nil || len(results) != 1 || len(results[0].Rows) != 1 {
		return
	}
	row := results[0].Rows[0]
	pid, err := strconv.ParseInt(string(row[0]), 10, 64)
	if err != nil {
		return
	}
	c.backendPID.Store(uint32(pid))
	mode := PoolUnknown
	if isDirect(pg, uint32(pid), row[1]) {
		mode = PoolDirect
	}
	c.mode.Store(uint32(mode))
}

// admitRoad judges a session-level statement by what stands between the
// connection and its backend, after finding that out.
func (c *Conn) admitRoad(ctx context.Context, locks []Lock, caller Caller) error {
	if err := c.admitPooler(ctx, locks, caller); err != nil {
		return err
	}
	if c.poolMode() == PoolUnknown {
		return c.object(ctx, RuleUnprovenPooling, locks, caller, nil)
	}
	return nil
}

// admitPooler is admitRoad for a statement that is only being prepared.
func (c *Conn) admitPooler(ctx context.Context, locks []Lock, caller Caller) error {
	c.askPoolMode(ctx)
	if mode := c.poolMode(); mode == PoolTransaction || mode == PoolStatement {
		return c.object(ctx, RuleTransactionPooling, locks, caller, fmt.Errorf("pool mode %s", mode))
	}
	return nil
}

// isDirect compares what the backend says of itself with what the connection
// knows: the process that greeted it, and its own end of the socket. A pooler
// greets with a number of its own making and has sockets of its own.
func isDirect(pg *pgconn.PgConn, pid uint32, clientPort []byte) bool {
	if pid != pg.PID() {
		return false
	}
	switch local := pg.Conn().LocalAddr().(type) {
	case *net.TCPAddr:
		return string(clientPort) == strconv.Itoa(local.Port)
	case *net.UnixAddr:
		return clientPort == nil
	}
	return false
}
