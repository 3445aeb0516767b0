package host

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
)

// volumeRoot is where local volumes lie. Only root enters it, so that nobody on the host reaches data by its path.
func (h *Host) volumeRoot() string { return filepath.Join(h.opts.DataDir, "volumes") }

func (h *Host) trashRoot() string { return filepath.Join(h.opts.DataDir, "trash") }

func (h *Host) makeRoots() error {
	for _, dir := range []string{h.opts.DataDir, h.volumeRoot(), h.trashRoot()} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return fmt.Errorf("make %s: %w", dir, err)
		}
		info, err := os.Lstat(dir)
		if err != nil {
			return fmt.Errorf("look at %s: %w", dir, err)
		}
		if uid, ok := ownerOf(info); !info.IsDir() || !ok || uid != uint32(os.Geteuid()) {
			return fmt.Errorf("%s is not a directory of the agent's own", dir)
		}
		if err := os.Chmod(dir, 0o700); err != nil {
			return fmt.Errorf("close %s to others: %w", dir, err)
		}
	}
	return nil
}

// ensureVolume makes a volume's directory when it is new and tells the engine its name. A volume that was made here once and
// is no longer there is an error, not an empty volume.
func (h *Host) ensureVolume(ctx context.Context, m Mount, id Identity) (Reason, error) {
	dir := filepath.Join(h.volumeRoot(), m.Volume)
	info, err := os.Lstat(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist) && h.journal.MadeVolume(m.Volume):
		return Reason{ReasonVolumeMissing, fmt.Sprintf("the data of volume %s is no longer on this host; an admin can bring it back to %s", m.Name, dir)}, nil
	case errors.Is(err, fs.ErrNotExist):
		if err := h.makeVolume(dir, m, id); err != nil {
			return Reason{}, err
		}
	case err != nil:
		return Reason{}, fmt.Errorf("look at volume %s: %w", m.Name, err)
	case !info.IsDir():
		return Reason{ReasonVolumeMissing, fmt.Sprintf("the data of volume %s is no directory: an admin must look at %s", m.Name, dir)}, nil
	default:
		if uid, ok := ownerOf(info); m.Home && ok && int64(uid) != id.UID {
			return Reason{ReasonRefused, fmt.Sprintf("volume %s belongs to uid %d and the user's is %d; an admin can hand it over with chown -R in %s",
				m.Name, uid, id.UID, dir)}, nil
		}
	}
	if err := h.journal.VolumeMade(m.Volume); err != nil {
		return Reason{}, err
	}
	return Reason{}, h.runtime.EnsureVolume(ctx, VolumeName(m.Volume), dir)
}

// makeVolume makes a directory of the user's and only then gives it its name, so that there is never half a volume.
func (h *Host) makeVolume(dir string, m Mount, id Identity) error {
	mode := fs.FileMode(0o755)
	if m.Home {
		mode = 0o700
	}
	temporary := filepath.Join(h.volumeRoot(), ".new-"+rand.Text())
	err := os.Mkdir(temporary, 0o700)
	if err == nil {
		err = os.Chown(temporary, int(id.UID), int(id.GID))
	}
	if err == nil {
		err = os.Chmod(temporary, mode)
	}
	if err == nil {
		err = unix.Renameat2(unix.AT_FDCWD, temporary, unix.AT_FDCWD, dir, unix.RENAME_NOREPLACE)
	}
	if err == nil {
		return syncDir(h.volumeRoot())
	}
	if rm := os.Remove(temporary); rm != nil && !errors.Is(rm, fs.ErrNotExist) {
		err = errors.Join(err, rm)
	}
	return fmt.Errorf("make volume %s: %w", m.Name, err)
}

// removeVolume puts a volume's data out of reach and notes that it is gone; the bytes follow in emptyTrash.
func (h *Host) removeVolume(ctx context.Context, id string) error {
	if err := h.runtime.RemoveVolume(ctx, VolumeName(id)); err != nil {
		return fmt.Errorf("remove volume %s from the engine: %w", id, err)
	}
	dir, away := filepath.Join(h.volumeRoot(), id), filepath.Join(h.trashRoot(), id+"-"+rand.Text())
	if err := os.Rename(dir, away); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove volume %s: %w", id, err)
	}
	if err := errors.Join(syncDir(h.trashRoot()), syncDir(h.volumeRoot())); err != nil {
		return fmt.Errorf("remove volume %s: %w", id, err)
	}
	h.log.Info("volume removed", "volume", id)
	return h.journal.VolumeRemoved(id)
}

// emptyTrash removes the data of removed volumes and directories that were never finished. os.RemoveAll follows no links.
func (h *Host) emptyTrash() error {
	var errs []error
	entries, err := os.ReadDir(h.trashRoot())
	errs = append(errs, err)
	for _, e := range entries {
		errs = append(errs, os.RemoveAll(filepath.Join(h.trashRoot(), e.Name())))
	}
	return errors.Join(errs...)
}

// sweepVolumes removes what a crash left of directories that never became volumes; it runs before anything is made.
func (h *Host) sweepVolumes() error {
	left, err := filepath.Glob(filepath.Join(h.volumeRoot(), ".new-*"))
	for _, dir := range left {
		err = errors.Join(err, os.Remove(dir)) // empty by construction
	}
	return err
}

// volumeLoop removes the volumes that are not wanted any more, once no run holds them.
func (h *Host) volumeLoop(ctx context.Context) {
	for {
		wait := h.opts.Times.Retry * 10
		for _, id := range h.volumesToRemove() {
			if err := h.removeVolume(ctx, id); err != nil && ctx.Err() == nil {
				h.log.Warn("a volume could not be removed; trying again", "volume", id, "error", err)
				wait = h.opts.Times.Retry
			}
		}
		if err := h.emptyTrash(); err != nil {
			h.log.Warn("data of removed volumes is still on disk; trying again", "error", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-h.volumesWake:
		case <-h.after(wait):
		}
	}
}

func (h *Host) volumesToRemove() []string {
	var out []string
	h.mu.Lock()
	gone := h.volumesGone
	held := map[string]bool{}
	for id := range h.heldVolumes {
		held[id] = true
	}
	for _, d := range h.desired {
		if d.Goal == GoalRunning {
			for _, m := range d.Mounts {
				held[m.Volume] = true
			}
		}
	}
	h.mu.Unlock()
	removed := map[string]bool{}
	for _, id := range h.journal.RemovedVolumes(-1) {
		removed[id] = true
	}
	for id := range gone {
		if !held[id] && !removed[id] {
			out = append(out, id)
		}
	}
	return out
}

// diskFree is the space that is left where volumes lie.
func (h *Host) diskFree() (mib int64, err error) {
	var st unix.Statfs_t
	if err := unix.Statfs(h.opts.DataDir, &st); err != nil {
		return 0, fmt.Errorf("look at the space in %s: %w", h.opts.DataDir, err)
	}
	return int64(st.Bavail) * st.Bsize >> 20, nil
}

func ownerOf(info fs.FileInfo) (uid uint32, ok bool) {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, false
	}
	return st.Uid, true
}
