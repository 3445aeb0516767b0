package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	driver "modernc.org/sqlite"
	lib "modernc.org/sqlite/lib"

	"github.com/carrel-dev/carrel/services/fleet"
)

// timeArg is a time as a parameter; zero is NULL.
func timeArg(t time.Time) any {
	if t.IsZero() {
		return nil
	}
	return millis(t)
}

// timeInto scans a time; NULL is zero.
type timeInto struct{ to *time.Time }

// Scan takes unix milliseconds.
func (v timeInto) Scan(src any) error {
	switch n := src.(type) {
	case nil:
		*v.to = time.Time{}
	case int64:
		*v.to = fromMillis(n)
	default:
		return fmt.Errorf("time column holds %T", src)
	}
	return nil
}

// textInto scans a text; NULL is empty.
type textInto[T ~string] struct{ to *T }

// Scan takes text or NULL.
func (v textInto[T]) Scan(src any) error {
	switch s := src.(type) {
	case nil:
		*v.to = ""
	case string:
		*v.to = T(s)
	default:
		return fmt.Errorf("text column holds %T", src)
	}
	return nil
}

// durationInto scans milliseconds.
type durationInto struct{ to *time.Duration }

// Scan takes an integer.
func (v durationInto) Scan(src any) error {
	n, ok := src.(int64)
	if !ok {
		return fmt.Errorf("duration column holds %T", src)
	}
	*v.to = time.Duration(n) * time.Millisecond
	return nil
}

// textArg is a text as a parameter; empty is NULL.
func textArg[T ~string](s T) any {
	if s == "" {
		return nil
	}
	return string(s)
}

// jsonArg is a value as JSON text. Values are our own plain structs, which cannot fail to encode.
func jsonArg(v any) string {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return string(text)
}

// jsonInto scans JSON text.
type jsonInto struct{ to any }

// Scan decodes; broken text is a damaged row.
func (v jsonInto) Scan(src any) error {
	text, ok := src.(string)
	if !ok {
		return &damagedError{fmt.Errorf("JSON column holds %T", src)}
	}
	if text == "" {
		return nil
	}
	if err := json.Unmarshal([]byte(text), v.to); err != nil {
		return &damagedError{err}
	}
	return nil
}

// damagedError is a row that cannot be understood; others are not affected.
type damagedError struct{ cause error }

// Error says what is wrong.
func (e *damagedError) Error() string { return e.cause.Error() }

// Unwrap returns the cause.
func (e *damagedError) Unwrap() error { return e.cause }

func isDamaged(err error) bool {
	var damaged *damagedError
	return errors.As(err, &damaged)
}

func isNoRows(err error) bool { return errors.Is(err, sql.ErrNoRows) }

func code(err error) int {
	var e *driver.Error
	if errors.As(err, &e) {
		return e.Code()
	}
	return 0
}

// primary strips the extension of a result code (https://www.sqlite.org/rescode.html).
func primary(code int) int { return code & 0xff }

func isFull(err error) bool {
	return primary(code(err)) == lib.SQLITE_FULL || code(err) == lib.SQLITE_IOERR_SHMSIZE
}

func isCorrupt(err error) bool {
	c := primary(code(err))
	return c == lib.SQLITE_CORRUPT || c == lib.SQLITE_NOTADB
}

func isUnique(err error) bool {
	c := code(err)
	return c == lib.SQLITE_CONSTRAINT_UNIQUE || c == lib.SQLITE_CONSTRAINT_PRIMARYKEY
}

func isFlushFailure(err error) bool {
	c := code(err)
	return c == lib.SQLITE_IOERR_FSYNC || c == lib.SQLITE_IOERR_DIR_FSYNC
}

func errDiskFull(cause error) error {
	if cause == nil {
		cause = errors.New("space set aside is in use")
	}
	return fleet.Wrap(cause, fleet.KindExhausted, "the gateway's database disk is full; free space on it, running workspaces go on")
}

// explain gives the driver's errors a kind and a message; a fleet.Error stays what it is.
func explain(err error) error {
	var known *fleet.Error
	if err == nil || errors.As(err, &known) {
		return err
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return fleet.Wrap(err, fleet.KindUnavailable, "the database did not answer in time; try again")
	}
	if isFull(err) {
		return errDiskFull(err)
	}
	switch primary(code(err)) {
	case lib.SQLITE_BUSY, lib.SQLITE_LOCKED:
		return fleet.Wrap(err, fleet.KindUnavailable, "another program holds the gateway's database; try again")
	case lib.SQLITE_IOERR, lib.SQLITE_CANTOPEN, lib.SQLITE_READONLY:
		return fleet.Wrap(err, fleet.KindUnavailable, "the gateway's database cannot be read or written")
	case lib.SQLITE_CORRUPT, lib.SQLITE_NOTADB:
		return fleet.Wrap(err, fleet.KindInternal, "the gateway's database is damaged; restore a backup")
	}
	return err
}

const idAlphabet = "abcdefghijklmnopqrstuvwxyz0123456789"

// IDLength is the length of an id in characters: 36^12 is about 4.7e18, so that ids never collide in practice.
const IDLength = 12

// NewID draws an id `[a-z0-9]` from a source of random bytes.
func NewID(random io.Reader) (string, error) {
	id := make([]byte, 0, IDLength)
	var b [2 * IDLength]byte
	for {
		if _, err := io.ReadFull(random, b[:]); err != nil {
			return "", fmt.Errorf("draw an id: %w", err)
		}
		for _, c := range b {
			if int(c) >= 256-256%len(idAlphabet) {
				continue // would favour the first letters
			}
			if id = append(id, idAlphabet[int(c)%len(idAlphabet)]); len(id) == IDLength {
				return string(id), nil
			}
		}
	}
}

func (t *tx) newID() (string, error) { return NewID(t.db.opts.Random) }

// isConstraint reports a refusal by an index or a trigger.
func isConstraint(err error) bool { return primary(code(err)) == lib.SQLITE_CONSTRAINT }
