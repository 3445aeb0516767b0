package sqlite

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// ballast is a file of zeros beside the database. On a full disk even a DELETE fails; giving the file up lets releases and the
// ledger go on until there is space again. Only the writer goroutine uses it after Open.
type ballast struct {
	path string
	size int64
	used bool // given up, and not yet made again
}

// fill writes the file where it is not whole. Sparse files hold nothing, so zeros are written.
func (b *ballast) fill() error {
	if b.size <= 0 {
		return nil
	}
	if info, err := os.Stat(b.path); err == nil && info.Size() == b.size {
		return nil
	}
	f, err := os.OpenFile(b.path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	block := make([]byte, 1<<20)
	for written := int64(0); written < b.size; written += int64(len(block)) {
		if _, err := f.Write(block); err != nil {
			return errors.Join(err, f.Close(), os.Remove(b.path))
		}
	}
	return errors.Join(f.Sync(), f.Close())
}

// fits reports whether the disk has clearly more free space than the file takes, so that making it does not fill the disk again.
func (b *ballast) fits() bool {
	var disk syscall.Statfs_t
	if err := syscall.Statfs(filepath.Dir(b.path), &disk); err != nil {
		return false
	}
	return int64(disk.Bavail)*int64(disk.Bsize) >= b.size+b.size/2
}

// give frees the space and reports whether there was any.
func (b *ballast) give() bool {
	if b.size <= 0 || b.used {
		return false
	}
	b.used = true
	err := os.Remove(b.path)
	return err == nil || errors.Is(err, fs.ErrNotExist)
}

// useBallast begins the time of little space; false when there is nothing left to give.
func (db *DB) useBallast() bool {
	if !db.ballast.give() {
		return false
	}
	db.log.Error("the database's disk is full; only ends, releases and revocations are recorded until there is space", "path", db.opts.Path)
	return true
}

// recoverSpace ends that time once the file can be made again.
func (db *DB) recoverSpace() {
	if !db.ballast.fits() || db.ballast.fill() != nil {
		return
	}
	db.ballast.used = false
	db.log.Info("the database's disk has space again", "path", db.opts.Path)
}
