package auth_test

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/carrel-dev/carrel/services/auth"
	"github.com/carrel-dev/carrel/services/fleet"
)

func keys(t *testing.T, path string) *auth.KeyDir {
	t.Helper()
	dir, err := auth.OpenKeyDir(path)
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func sealer(t *testing.T, dir *auth.KeyDir) *auth.Sealer {
	t.Helper()
	s, err := dir.Sealer()
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// T-11: keys are made with modes that only their owner can use, and wider ones are refused with the command that helps.
func TestKeyDirModes(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a", "keys")
	dir := keys(t, path)
	s := sealer(t, dir)
	if _, err := dir.HostCA(s); err != nil {
		t.Fatal(err)
	}
	if _, err := dir.TLSCA("test", time.Now()); err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(path)
	if err != nil || len(entries) != 3 {
		t.Fatalf("files %v, %v", entries, err)
	}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s has mode %o, %v", e.Name(), info.Mode().Perm(), err)
		}
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("directory has mode %o, %v", info.Mode().Perm(), err)
	}
	for _, mode := range []os.FileMode{0o640, 0o604, 0o620, 0o601} {
		if err := os.Chmod(filepath.Join(path, "seal.key"), mode); err != nil {
			t.Fatal(err)
		}
		if _, err := dir.Sealer(); !fleet.IsKind(err, fleet.KindInvalid) || !strings.Contains(err.Error(), "chmod 600") {
			t.Errorf("mode %o: %v", mode, err)
		}
	}
	if err := os.Chmod(path, 0o750); err != nil {
		t.Fatal(err)
	}
	if _, err := auth.OpenKeyDir(path); !fleet.IsKind(err, fleet.KindInvalid) || !strings.Contains(err.Error(), "chmod 700") {
		t.Errorf("directory of mode 750: %v", err)
	}
}

func TestKeysAreMadeOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "keys")
	first := sealer(t, keys(t, path)).Seal([]byte("secret"), "w1")
	plain, err := sealer(t, keys(t, path)).Open(first, "w1")
	if err != nil || string(plain) != "secret" {
		t.Errorf("a second start reads %q, %v", plain, err)
	}
	if leftovers, err := filepath.Glob(filepath.Join(path, ".new-*")); err != nil || len(leftovers) != 0 {
		t.Errorf("left over: %v, %v", leftovers, err)
	}
}

func TestSealerOpensOnlyWhatItSealedForThePurpose(t *testing.T) {
	s := sealer(t, keys(t, filepath.Join(t.TempDir(), "keys")))
	other := sealer(t, keys(t, filepath.Join(t.TempDir(), "keys")))
	sealed := s.Seal([]byte("secret"), "w1")
	if bytes.Contains(sealed, []byte("secret")) || bytes.Equal(sealed, s.Seal([]byte("secret"), "w1")) {
		t.Error("sealing hides nothing, or repeats itself")
	}
	if plain, err := s.Open(sealed, "w1"); err != nil || string(plain) != "secret" {
		t.Fatalf("open: %q, %v", plain, err)
	}
	for n := range sealed {
		if _, err := s.Open(sealed[:n], "w1"); !fleet.IsKind(err, fleet.KindInternal) {
			t.Fatalf("cut to %d: %v", n, err)
		}
		broken := bytes.Clone(sealed)
		broken[n] ^= 1
		if _, err := s.Open(broken, "w1"); err == nil {
			t.Fatalf("byte %d changed, and it opens", n)
		}
	}
	if _, err := s.Open(sealed, "w2"); err == nil {
		t.Error("opens for another purpose")
	}
	if _, err := other.Open(sealed, "w1"); err == nil || !strings.Contains(err.Error(), "seal.key") {
		t.Errorf("another deployment's key: %v", err)
	}
	if plain, err := s.Open(s.Seal(nil, "w1"), "w1"); err != nil || len(plain) != 0 {
		t.Errorf("empty: %q, %v", plain, err)
	}
}

func TestDamagedKeyFilesAreNamed(t *testing.T) {
	for name, read := range map[string]func(*auth.KeyDir) error{
		"seal.key":    func(d *auth.KeyDir) error { _, err := d.Sealer(); return err },
		"tls-ca.pem":  func(d *auth.KeyDir) error { _, err := d.TLSCA("x", time.Now()); return err },
		"ssh-host-ca": func(d *auth.KeyDir) error { _, err := d.HostCA(sealer(t, d)); return err },
	} {
		t.Run(name, func(t *testing.T) {
			for _, content := range []string{"", "short", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"} {
				path := filepath.Join(t.TempDir(), "keys")
				dir := keys(t, path)
				if err := os.WriteFile(filepath.Join(path, name), []byte(content), 0o600); err != nil {
					t.Fatal(err)
				}
				if err := read(dir); err == nil {
					t.Errorf("%q was taken for a key", content)
				} else if name != "ssh-host-ca" && !strings.Contains(err.Error(), name) {
					t.Errorf("%q: %v does not name the file", content, err)
				}
				if after, err := os.ReadFile(filepath.Join(path, name)); err != nil || string(after) != content {
					t.Errorf("the damaged file was changed to %q, %v", after, err)
				}
			}
		})
	}
}
