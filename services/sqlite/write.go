package sqlite

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
)

// job is one write function and who waits for it.
type job struct {
	ctx      context.Context
	now      int64
	reserved bool // may use the space set aside for a full disk: what ends things or keeps the bill right
	run      func(*tx) error
	err      error
	done     chan struct{}
}

// write runs a function in a write transaction, together with others that wait, and returns when it is on disk. An error of the
// function undoes its own changes only. The function may run at any moment until write returns, never later.
func (db *DB) write(ctx context.Context, now time.Time, run func(*tx) error) error {
	return db.submit(&job{ctx: ctx, now: millis(now), run: run, done: make(chan struct{})})
}

// record is write for what must go on while the disk is full: ends, releases, revocations.
func (db *DB) record(ctx context.Context, now time.Time, run func(*tx) error) error {
	return db.submit(&job{ctx: ctx, now: millis(now), run: run, done: make(chan struct{}), reserved: true})
}

func (db *DB) submit(j *job) error {
	if err := context.Cause(j.ctx); err != nil {
		return err
	}
	select {
	case <-db.stop:
		return errClosed()
	case <-j.ctx.Done():
		return context.Cause(j.ctx)
	case db.queue <- j:
	}
	select {
	case <-j.done:
		return j.err
	case <-db.done:
	}
	select {
	case <-j.done: // both were ready
		return j.err
	default:
		return errClosed()
	}
}

func errClosed() error {
	return fleet.Errorf(fleet.KindUnavailable, "the gateway is stopping; try again in a moment")
}

// writeLoop is the one writer: it takes what waits, up to a batch, and commits it with one flush to disk.
func (db *DB) writeLoop() {
	defer close(db.done)
	for {
		select {
		case j := <-db.queue:
			db.commitBatch(db.gather(j))
		case <-db.stop:
			for { // what was accepted before the stop
				select {
				case j := <-db.queue:
					db.commitBatch(db.gather(j))
				default:
					return
				}
			}
		}
	}
}

func (db *DB) gather(first *job) []*job {
	batch := []*job{first}
	for len(batch) < db.opts.MaxBatch {
		select {
		case j := <-db.queue:
			batch = append(batch, j)
		default:
			return batch
		}
	}
	return batch
}

// commitBatch runs jobs in one transaction and tells each its outcome after the commit. When SQLite itself gave up the whole
// transaction (disk full, input/output), the jobs before are refused too, since nothing of them is on disk, and the rest go on.
func (db *DB) commitBatch(batch []*job) {
	for len(batch) > 0 {
		used := db.transact(batch)
		for _, j := range batch[:used] {
			close(j.done)
		}
		batch = batch[used:]
	}
	if db.batches++; db.batches >= batchesBetweenLooks {
		db.batches = 0
		db.boundLog()
	}
}

const (
	// batchesBetweenLooks at the log's size: a batch writes at most some hundred KiB.
	batchesBetweenLooks = 16
	// checkpointWait is how long writes stand still for readers when the log is too long; a reader that is slower is waited for again later.
	checkpointWait = 100 * time.Millisecond
)

// boundLog ends a log that has grown over the limit. SQLite's own checkpoints never begin it anew while readers follow each other
// without a pause.
func (db *DB) boundLog() {
	info, err := os.Stat(db.opts.Path + "-wal")
	if err != nil || info.Size() < int64(db.opts.WALLimitMiB)<<20 {
		return
	}
	for _, statement := range []string{
		fmt.Sprintf("PRAGMA busy_timeout = %d", checkpointWait.Milliseconds()), "PRAGMA wal_checkpoint(TRUNCATE)",
		fmt.Sprintf("PRAGMA busy_timeout = %d", db.opts.BusyTimeout.Milliseconds()),
	} {
		if err := db.do(statement); err != nil {
			db.log.Debug("the database's log is still read", "error", err)
		}
	}
}

// transact commits a first part of the batch and returns how many jobs have their outcome.
func (db *DB) transact(batch []*job) int {
	if failure := db.failed.Load(); failure != nil {
		return fail(batch, *failure)
	}
	if db.ballast.used {
		db.recoverSpace()
	}
	if err := db.begin(); err != nil {
		return fail(batch, db.broken("begin", err))
	}
	at, changed := db.lastCommit.Load(), false
	for i, j := range batch {
		at = max(at, j.now)
		j.err = db.runJob(j, at)
		if j.err != nil && !db.inTransaction() {
			return db.lost(batch, i)
		}
		changed = changed || j.err == nil
	}
	if !changed { // nobody makes the disk flush by asking for what is refused
		db.rollback()
		return len(batch)
	}
	if err := db.commit(at); err != nil {
		db.rollback()
		if isFull(err) && db.useBallast() {
			return 0 // once more, with the space set aside
		}
		return fail(batch, db.broken("commit", err))
	}
	db.lastCommit.Store(at)
	return len(batch)
}

// lost handles a transaction that SQLite rolled back while job i ran.
func (db *DB) lost(batch []*job, i int) int {
	cause := batch[i].err
	if isFull(cause) && db.useBallast() {
		return 0
	}
	told := db.broken("write", cause)
	return fail(batch[:i+1], told)
}

func fail(batch []*job, err error) int {
	for _, j := range batch {
		j.err = err
	}
	return len(batch)
}

// do runs a statement of the writer's own, which no caller's context ends.
func (db *DB) do(query string) error { return db.writer.do(context.Background(), query) }

func (db *DB) begin() error {
	if err := db.do("BEGIN IMMEDIATE"); err != nil {
		return err
	}
	var nonce int64
	err := db.writer.row(context.Background(), `SELECT value FROM meta WHERE key = 'writer'`).Scan(&nonce)
	if err == nil && nonce != db.nonce {
		err = errFenced
	}
	if err != nil {
		db.rollback()
	}
	return err
}

var errFenced = errors.New("another gateway took the database over")

func (db *DB) runJob(j *job, at int64) error {
	if err := context.Cause(j.ctx); err != nil {
		return err
	}
	if db.ballast.used && !j.reserved {
		return errDiskFull(nil)
	}
	if err := db.do("SAVEPOINT job"); err != nil {
		return err
	}
	// The statements do not take the caller's context: an interrupt would roll back everybody's part of the batch.
	t := &tx{ctx: context.WithoutCancel(j.ctx), session: db.writer, db: db, now: at}
	err := db.guard(j, t)
	if err != nil {
		if undo := db.do("ROLLBACK TO job"); undo != nil {
			return fmt.Errorf("%w (undo: %w)", err, undo)
		}
	}
	if release := db.do("RELEASE job"); release != nil {
		return errors.Join(err, release)
	}
	return err
}

// guard turns a panic of one function into its error, so that the others' part is not lost.
func (db *DB) guard(j *job, t *tx) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("write function: panic: %v", p)
		}
	}()
	return explain(j.run(t))
}

func (db *DB) commit(at int64) error {
	if at > db.lastCommit.Load() {
		if _, err := db.writer.exec(context.Background(), `UPDATE meta SET value = ? WHERE key = 'last_commit'`, at); err != nil {
			return err
		}
	}
	return db.do("COMMIT")
}

func (db *DB) rollback() {
	if err := db.do("ROLLBACK"); err != nil {
		db.log.Debug("nothing to roll back", "error", err)
	}
}

// inTransaction asks by trying: a BEGIN inside a transaction fails, outside it works and is taken back.
func (db *DB) inTransaction() bool {
	if err := db.do("BEGIN"); err != nil {
		return true
	}
	db.rollback()
	return false
}

// broken gives an error of the transaction itself its message, and stops all writing when the file cannot be trusted: after a
// failed flush the kernel may have dropped pages, and a second try would report success without them.
func (db *DB) broken(act string, err error) error {
	if errors.Is(err, errFenced) {
		told := fleet.Wrap(err, fleet.KindUnavailable, "another gateway took the database over; this one writes no more")
		db.failed.Store(&told)
		db.log.Error("another gateway took the database over")
		return told
	}
	if isFlushFailure(err) {
		told := fleet.Wrap(err, fleet.KindUnavailable, "the disk failed to store the database; restart the gateway once the disk is well")
		db.failed.Store(&told)
		db.log.Error("the database could not be flushed", "act", act, "error", err)
		return told
	}
	return explain(err)
}

// Failed returns why nothing is written any more, or nil. A gateway that sees an error here should end.
func (db *DB) Failed() error {
	if failure := db.failed.Load(); failure != nil {
		return *failure
	}
	return nil
}
