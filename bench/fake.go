package main

// This file owns the driver that does nothing, for questions of nanoseconds: it
// has the interfaces of pgx's stdlib, so that database/sql takes the same ways
// through it. It answers every statement with one row of one true.

import (
	"context"
	"database/sql/driver"
	"io"
)

type fakeConnector struct{}

func (fakeConnector) Connect(context.Context) (driver.Conn, error) {
	c := &fakeConn{}
	c.stmt.conn = c
	return c, nil
}

func (c fakeConnector) Driver() driver.Driver            { return c }
func (c fakeConnector) Open(string) (driver.Conn, error) { return c.Connect(context.Background()) }

// fakeConn has one of everything, so that it allocates nothing.
type fakeConn struct {
	rows fakeRows
	stmt fakeStmt
}

var (
	_ driver.ConnBeginTx        = (*fakeConn)(nil)
	_ driver.ConnPrepareContext = (*fakeConn)(nil)
	_ driver.ExecerContext      = (*fakeConn)(nil)
	_ driver.NamedValueChecker  = (*fakeConn)(nil)
	_ driver.Pinger             = (*fakeConn)(nil)
	_ driver.QueryerContext     = (*fakeConn)(nil)
	_ driver.SessionResetter    = (*fakeConn)(nil)
)

func (c *fakeConn) Prepare(string) (driver.Stmt, error) { return &c.stmt, nil }
func (c *fakeConn) Close() error                        { return nil }
func (c *fakeConn) Begin() (driver.Tx, error)           { return fakeTx{}, nil }
func (c *fakeConn) Ping(context.Context) error          { return nil }

func (c *fakeConn) PrepareContext(context.Context, string) (driver.Stmt, error) {
	return &c.stmt, nil
}

func (c *fakeConn) BeginTx(context.Context, driver.TxOptions) (driver.Tx, error) {
	return fakeTx{}, nil
}

func (c *fakeConn) CheckNamedValue(*driver.NamedValue) error { return nil }
func (c *fakeConn) ResetSession(context.Context) error       { return nil }

func (c *fakeConn) ExecContext(context.Context, string, []driver.NamedValue) (driver.Result, error) {
	return driver.ResultNoRows, nil
}

func (c *fakeConn) QueryContext(context.Context, string, []driver.NamedValue) (driver.Rows, error) {
	c.rows.read = false
	return &c.rows, nil
}

type fakeTx struct{}

func (fakeTx) Commit() error   { return nil }
func (fakeTx) Rollback() error { return nil }

type fakeStmt struct{ conn *fakeConn }

var (
	_ driver.StmtExecContext  = (*fakeStmt)(nil)
	_ driver.StmtQueryContext = (*fakeStmt)(nil)
)

func (s *fakeStmt) Close() error                               { return nil }
func (s *fakeStmt) NumInput() int                              { return -1 }
func (s *fakeStmt) Exec([]driver.Value) (driver.Result, error) { return driver.ResultNoRows, nil }

func (s *fakeStmt) Query([]driver.Value) (driver.Rows, error) {
	return s.QueryContext(context.Background(), nil)
}

func (s *fakeStmt) ExecContext(context.Context, []driver.NamedValue) (driver.Result, error) {
	return driver.ResultNoRows, nil
}

func (s *fakeStmt) QueryContext(ctx context.Context, args []driver.NamedValue) (driver.Rows, error) {
	return s.conn.QueryContext(ctx, "", args)
}

type fakeRows struct{ read bool }

var fakeColumns = []string{"answer"}

func (r *fakeRows) Columns() []string { return fakeColumns }
func (r *fakeRows) Close() error      { return nil }

func (r *fakeRows) Next(dest []driver.Value) error {
	if r.read {
		return io.EOF
	}
	r.read, dest[0] = true, true
	return nil
}
