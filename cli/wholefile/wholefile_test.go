package wholefile

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"
)

func TestSecretIsForTheOwnerAndNeverThroughALink(t *testing.T) {
	path := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(path, []byte("old"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := WriteSecret(path, []byte("new")); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v %v", info.Mode(), err)
	}
	link := path + "-link"
	if err := os.Symlink(path, link); err != nil {
		t.Fatal(err)
	}
	if err := WriteSecret(link, []byte("x")); !errors.Is(err, ErrSymlink) {
		t.Errorf("link: %v", err)
	}
	if b, err := os.ReadFile(path); err != nil || string(b) != "new" {
		t.Errorf("%q %v", b, err)
	}
}

func TestLoopOfLinksIsAnError(t *testing.T) {
	dir := t.TempDir()
	a, b := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	if err := errors.Join(os.Symlink(b, a), os.Symlink(a, b)); err != nil {
		t.Fatal(err)
	}
	if _, err := Edit(a, func([]byte) ([]byte, error) { return []byte("x"), nil }); err == nil {
		t.Error("no error")
	}
}

func TestUnwritableDirectoryChangesNothing(t *testing.T) {
	if _, err := Write(filepath.Join(t.TempDir(), "missing", "f"), []byte("x")); err == nil {
		t.Error("no error")
	}
}

func TestLeftoversOfTheKilledAreSwept(t *testing.T) {
	dir := t.TempDir()
	old, young := filepath.Join(dir, ".f"+tempMark+"1"), filepath.Join(dir, ".f"+tempMark+"2")
	if err := errors.Join(os.WriteFile(old, nil, 0o600), os.WriteFile(young, nil, 0o600), os.Chtimes(old, time.Now(), time.Now().Add(-time.Hour))); err != nil {
		t.Fatal(err)
	}
	if _, err := Write(filepath.Join(dir, "f"), []byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(old); !os.IsNotExist(err) {
		t.Error("the old one is there")
	}
	if _, err := os.Stat(young); err != nil {
		t.Error("the young one is gone")
	}
}

func TestLockWaitsAndGivesUpWithItsContext(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	unlock, err := Lock(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := Lock(ctx, path); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("second lock: %v", err)
	}
	unlock()
	again, err := Lock(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	again()
}
