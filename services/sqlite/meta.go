package sqlite

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"time"
)

// claim reads the file's generation and newest time, and writes a number that only this process knows, which every later
// transaction compares: a gateway whose lock did not hold (a copied or network file system) writes nothing after another began.
func (db *DB) claim(ctx context.Context) error {
	var b [8]byte
	if _, err := rand.Read(b[:]); err != nil {
		return err
	}
	db.nonce = int64(binary.LittleEndian.Uint64(b[:]) >> 1)
	if _, err := db.writer.exec(ctx, `UPDATE meta SET value = ? WHERE key = 'writer'`, db.nonce); err != nil {
		return explain(err)
	}
	for key, to := range map[string]interface{ Store(int64) }{"last_commit": &db.lastCommit, "database_generation": &db.generation} {
		var value int64
		if err := db.writer.row(ctx, `SELECT value FROM meta WHERE key = ?`, key).Scan(&value); err != nil {
			return explain(err)
		}
		to.Store(value)
	}
	return nil
}

// LastCommit returns the newest gateway time in the database, from which time goes on after a restart; zero in a new file.
func (db *DB) LastCommit(context.Context) (time.Time, error) {
	if ms := db.lastCommit.Load(); ms > 0 {
		return fromMillis(ms), nil
	}
	return time.Time{}, nil
}

// Generation returns the database generation, which stands first in every stamp.
func (db *DB) Generation() int64 { return db.generation.Load() }

// Recover raises the generation above atLeast and above the present one, so that agents follow this file again after it was restored
// from a backup.
func (db *DB) Recover(ctx context.Context, atLeast int64, now time.Time) (int64, error) {
	var next int64
	err := db.record(ctx, now, func(t *tx) error {
		next = max(db.generation.Load(), atLeast) + 1
		return t.exec(`UPDATE meta SET value = ? WHERE key = 'database_generation'`, next)
	})
	if err != nil {
		return 0, err
	}
	db.generation.Store(next)
	return next, nil
}
