package account

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// Bounds on what is copied from /etc/skel: real ones hold a few kilobytes.
const (
	maxSkelFiles = 1000
	maxSkelBytes = 64 << 20
)

// prepareHome makes the home and gives it to the user: the directory itself, never what is in it. An empty one gets the
// image's skeleton. A home that another user owns and that is not empty is refused.
func prepareHome(root string, u User) error {
	home := filepath.Join(root, u.Home)
	info, err := makeHome(home)
	if err != nil {
		return err
	}
	if !info.IsDir() {
		return fmt.Errorf("home %s is not a directory: change the image or the volume", u.Home)
	}
	empty, err := isEmpty(home)
	if err != nil {
		return fmt.Errorf("look into home: %w", err)
	}
	owner := int(info.Sys().(*syscall.Stat_t).Uid)
	if owner != u.UID && owner != 0 && !empty {
		return fmt.Errorf("%w: %s has uid %d, the workspace's user %d; give it over on the host (chown), or use another home",
			ErrHomeOwner, u.Home, owner, u.UID)
	}
	if empty {
		err := copySkel(filepath.Join(root, "etc/skel"), home, u)
		squashed := owner == u.UID && errors.Is(err, fs.ErrPermission) // NFS, where root may not write: the home stays empty
		if err != nil && !squashed {
			return fmt.Errorf("fill home from /etc/skel: %w", err)
		}
	}
	// Last, so that a start that was cut short does not leave a home that looks finished.
	if owner != u.UID {
		if err := os.Lchown(home, u.UID, u.GID); err != nil {
			return fmt.Errorf("give home %s to %s: %w", u.Home, u.Login, err)
		}
	}
	return nil
}

// makeHome makes the directory where there is none, and returns what is there.
func makeHome(home string) (fs.FileInfo, error) {
	if err := os.MkdirAll(filepath.Dir(home), 0o755); err != nil {
		return nil, fmt.Errorf("make home: %w", err)
	}
	if err := os.Mkdir(home, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("make home: %w", err)
	}
	info, err := os.Lstat(home)
	if err != nil {
		return nil, fmt.Errorf("look at home: %w", err)
	}
	return info, nil
}

// isEmpty leaves out what mkfs puts into a fresh file system.
func isEmpty(dir string) (bool, error) {
	f, err := os.Open(dir)
	if err != nil {
		return false, err
	}
	defer f.Close()
	names, err := f.Readdirnames(2)
	if err != nil && !errors.Is(err, io.EOF) {
		return false, err
	}
	return len(names) == 0 || len(names) == 1 && names[0] == "lost+found", nil
}

// copySkel copies files, directories and links; anything else in a skeleton is left out.
func copySkel(skel, home string, u User) error {
	files, bytes := 0, int64(0)
	err := filepath.WalkDir(skel, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(skel, path)
		if err != nil || rel == "." {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		if files++; files > maxSkelFiles {
			return fmt.Errorf("more than %d files", maxSkelFiles)
		}
		if info.Mode().IsRegular() {
			if bytes += info.Size(); bytes > maxSkelBytes {
				return fmt.Errorf("more than %d bytes", maxSkelBytes)
			}
		}
		return copyEntry(path, filepath.Join(home, rel), info, u)
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil // an image without a skeleton
	}
	return err
}

func copyEntry(from, to string, info fs.FileInfo, u User) error {
	switch {
	case info.IsDir():
		if err := os.Mkdir(to, info.Mode().Perm()); err != nil {
			return err
		}
	case info.Mode()&fs.ModeSymlink != 0:
		target, err := os.Readlink(from)
		if err != nil {
			return err
		}
		if err := os.Symlink(target, to); err != nil {
			return err
		}
	case info.Mode().IsRegular():
		if err := copyFile(from, to, info.Mode().Perm()); err != nil {
			return err
		}
	default:
		return nil
	}
	return os.Lchown(to, u.UID, u.GID)
}

func copyFile(from, to string, mode fs.FileMode) error {
	src, err := os.Open(from)
	if err != nil {
		return err
	}
	defer src.Close()
	dst, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		return err
	}
	_, err = io.Copy(dst, src)
	return errors.Join(err, dst.Close())
}
