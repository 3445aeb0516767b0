package sqlite

import (
	"context"
	"database/sql"
	"time"
)

// session is one connection with the statements that were prepared on it. One goroutine at a time uses it.
type session struct {
	conn  *sql.Conn
	stmts map[string]*sql.Stmt
}

func newSession(conn *sql.Conn) *session {
	return &session{conn: conn, stmts: map[string]*sql.Stmt{}}
}

func (s *session) close() {
	for _, stmt := range s.stmts {
		_ = stmt.Close() // closing the connection ends them anyway
	}
	_ = s.conn.Close() // back to the pool, which is closed next and reports
}

// do runs a statement without parameters.
func (s *session) do(ctx context.Context, query string) error {
	_, err := s.exec(ctx, query)
	return err
}

func (s *session) prepare(ctx context.Context, query string) (*sql.Stmt, error) {
	if stmt, ok := s.stmts[query]; ok {
		return stmt, nil
	}
	stmt, err := s.conn.PrepareContext(ctx, query)
	if err != nil {
		return nil, err
	}
	s.stmts[query] = stmt
	return stmt, nil
}

func (s *session) exec(ctx context.Context, query string, args ...any) (sql.Result, error) {
	stmt, err := s.prepare(ctx, query) //nolint:sqlclosecheck // kept for the next time; close closes it
	if err != nil {
		return nil, err
	}
	return stmt.ExecContext(ctx, args...)
}

// row is a single row; an error of the preparation comes out of its Scan.
func (s *session) row(ctx context.Context, query string, args ...any) scanner {
	stmt, err := s.prepare(ctx, query) //nolint:sqlclosecheck // kept for the next time; close closes it
	if err != nil {
		return failedRow{err}
	}
	return stmt.QueryRowContext(ctx, args...)
}

func (s *session) query(ctx context.Context, query string, args ...any) (*sql.Rows, error) {
	stmt, err := s.prepare(ctx, query) //nolint:sqlclosecheck // kept for the next time; close closes it
	if err != nil {
		return nil, err
	}
	return stmt.QueryContext(ctx, args...)
}

// scanner is a row, or where a query's rows stand.
type scanner interface{ Scan(dest ...any) error }

type failedRow struct{ err error }

func (r failedRow) Scan(...any) error { return r.err }

// tx is one transaction, as its function sees it. now is the gateway time of a write, never less than any commit before.
type tx struct {
	ctx     context.Context
	session *session
	db      *DB
	now     int64
	// lastHash is the ledger's last hash once this transaction wrote a fact; nil: ask.
	lastHash []byte
}

func (t *tx) exec(query string, args ...any) error {
	_, err := t.session.exec(t.ctx, query, args...)
	return err
}

// affect is exec that returns how many rows changed.
func (t *tx) affect(query string, args ...any) (int64, error) {
	result, err := t.session.exec(t.ctx, query, args...)
	if err != nil {
		return 0, err
	}
	return result.RowsAffected()
}

// attempt runs a part whose changes are undone when it fails, while the rest of the transaction stands.
func (t *tx) attempt(run func() error) error {
	if err := t.exec("SAVEPOINT part"); err != nil {
		return err
	}
	err := run()
	if err != nil {
		t.lastHash = nil
		if undo := t.exec("ROLLBACK TO part"); undo != nil {
			return undo
		}
	}
	if release := t.exec("RELEASE part"); release != nil {
		return release
	}
	return err
}

func (t *tx) row(query string, args ...any) scanner { return t.session.row(t.ctx, query, args...) }

// all collects a query's rows. Rows are always taken in full before anything else is done, so that no reader stands still inside
// a transaction.
func all[T any](t *tx, scan func(scanner) (T, error), query string, args ...any) ([]T, error) {
	var list []T
	err := each(t, func(s scanner) error {
		v, err := scan(s)
		if err == nil {
			list = append(list, v)
		}
		return err
	}, query, args...)
	return list, err
}

// each calls a function with every row; the function must not use the transaction.
func each(t *tx, take func(scanner) error, query string, args ...any) error {
	rows, err := t.session.query(t.ctx, query, args...)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		if err := take(rows); err != nil {
			return err
		}
	}
	return rows.Err()
}

// scanWith makes a scan function of one that names a value's places.
func scanWith[T any](into func(*T) []any) func(scanner) (T, error) {
	return func(s scanner) (T, error) {
		var v T
		err := s.Scan(into(&v)...)
		return v, err
	}
}

func scanString[T ~string](s scanner) (v T, err error) {
	err = s.Scan(&v)
	return v, err
}

func scanInt[T ~int64](s scanner) (v T, err error) {
	err = s.Scan(&v)
	return v, err
}

// read runs a function in a read transaction of its own, which has a time limit.
func (db *DB) read(ctx context.Context, run func(*tx) error) error {
	ctx, cancel := context.WithTimeout(ctx, db.opts.ReadTimeout)
	defer cancel()
	var s *session
	select {
	case s = <-db.readers:
	case <-db.stop:
		return errClosed()
	case <-ctx.Done():
		return explain(context.Cause(ctx))
	}
	defer func() { db.readers <- s }()
	whole := context.WithoutCancel(ctx) // a connection goes back without a transaction, also when the time is over
	if err := s.do(whole, "BEGIN"); err != nil {
		return explain(err)
	}
	err := run(&tx{ctx: ctx, session: s, db: db, now: db.lastCommit.Load()})
	if end := s.do(whole, "COMMIT"); end != nil {
		_ = s.do(whole, "ROLLBACK") // an interrupted read may have ended by itself
		if err == nil {
			err = end
		}
	}
	return explain(err)
}

// millis is a time as stored; fractions of a millisecond are cut.
func millis(t time.Time) int64 { return t.UnixMilli() }

// fromMillis is the time that was stored, in UTC.
func fromMillis(ms int64) time.Time { return time.UnixMilli(ms).UTC() }
