package sqlite

import (
	"context"
	"io/fs"
	"time"
)

// WithMigrations gives tests a schema to come.
func WithMigrations(o *Options, files fs.FS) { o.migrations = files }

// Embedded is the schema of this program.
func Embedded() fs.FS { return embedded() }

// WriteText runs statements as one write function.
func (db *DB) WriteText(ctx context.Context, now time.Time, after func() error, statements ...string) error {
	return db.write(ctx, now, func(t *tx) error {
		for _, s := range statements {
			if err := t.exec(s); err != nil {
				return err
			}
		}
		if after != nil {
			return after()
		}
		return nil
	})
}

// HoldRead stays in a read transaction until hold returns or the transaction's time is over.
func (db *DB) HoldRead(ctx context.Context, hold func(ctx context.Context)) error {
	return db.read(ctx, func(t *tx) error {
		var n int
		if err := t.row(`SELECT count(*) FROM workspace`).Scan(&n); err != nil {
			return err
		}
		hold(t.ctx)
		return t.row(`SELECT count(*) FROM workspace WHERE name <> ''`).Scan(&n)
	})
}
