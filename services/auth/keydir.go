package auth

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/carrel-dev/carrel/services/fleet"
)

// sealKeyBytes is the length of an AES-256 key.
const sealKeyBytes = 32

// KeyDir is the directory of a deployment's own keys, apart from its database, so that a stolen database opens nothing.
type KeyDir struct{ path string }

// OpenKeyDir makes the directory (mode 0700) when it is missing, and refuses one that others can read.
func OpenKeyDir(path string) (*KeyDir, error) {
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, fmt.Errorf("make key directory: %w", err)
	}
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("look at key directory: %w", err)
	}
	if info.Mode().Perm()&0o077 != 0 {
		return nil, fleet.Errorf(fleet.KindInvalid, "the key directory %s is open to others (mode %o); run `chmod 700 %s`", path, info.Mode().Perm(), path)
	}
	return &KeyDir{path: path}, nil
}

// load returns a file's content, or makes it once and for all. A file that others can read is refused.
func (d *KeyDir) load(name string, generate func() ([]byte, error)) ([]byte, error) {
	path := filepath.Join(d.path, name)
	if info, err := os.Stat(path); err == nil {
		if info.Mode().Perm()&0o077 != 0 {
			return nil, fleet.Errorf(fleet.KindInvalid, "the key file %s is open to others (mode %o); run `chmod 600 %s`", path, info.Mode().Perm(), path)
		}
		return os.ReadFile(path)
	} else if !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("look at key file: %w", err)
	}
	content, err := generate()
	if err != nil {
		return nil, fmt.Errorf("make key %s: %w", name, err)
	}
	if err := writeKey(path, content); err != nil {
		return nil, err
	}
	return content, nil
}

// writeKey writes a file that is either not there or whole, and on disk when it returns.
func writeKey(path string, content []byte) error {
	tmp, err := os.CreateTemp(filepath.Dir(path), ".new-*") // mode 0600
	if err != nil {
		return fmt.Errorf("write key: %w", err)
	}
	defer func() { _ = os.Remove(tmp.Name()) }() // gone already when the rename went well
	_, err = tmp.Write(content)
	if err == nil {
		err = tmp.Sync()
	}
	if cerr := tmp.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(tmp.Name(), path)
	}
	if err != nil {
		return fmt.Errorf("write key %s: %w", path, err)
	}
	return syncDir(filepath.Dir(path))
}

func syncDir(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("sync %s: %w", path, err)
	}
	err = dir.Sync()
	if cerr := dir.Close(); err == nil {
		err = cerr
	}
	return err
}

// Sealer encrypts small secrets for the database with AES-256-GCM.
type Sealer struct{ aead cipher.AEAD }

// Sealer returns the deployment's sealer; its key lies in seal.key.
func (d *KeyDir) Sealer() (*Sealer, error) {
	key, err := d.load("seal.key", func() ([]byte, error) {
		key := make([]byte, sealKeyBytes)
		_, err := rand.Read(key)
		return key, err
	})
	if err != nil {
		return nil, err
	}
	if len(key) != sealKeyBytes {
		return nil, fleet.Errorf(fleet.KindInvalid, "seal.key has %d bytes, not %d; put back the file that this database was made with", len(key), sealKeyBytes)
	}
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, err
	}
	aead, err := cipher.NewGCM(block)
	if err != nil {
		return nil, err
	}
	return &Sealer{aead: aead}, nil
}

// Seal encrypts plain for one purpose, such as a workspace id; it opens for no other.
func (s *Sealer) Seal(plain []byte, purpose string) []byte {
	nonce := make([]byte, s.aead.NonceSize())
	_, _ = rand.Read(nonce) // never fails: crypto/rand ends the process instead (Go 1.24)
	return s.aead.Seal(nonce, nonce, plain, []byte(purpose))
}

// Open decrypts what Seal made for the same purpose.
func (s *Sealer) Open(sealed []byte, purpose string) ([]byte, error) {
	n := s.aead.NonceSize()
	if len(sealed) < n {
		return nil, fleet.Errorf(fleet.KindInternal, "a sealed secret is cut off")
	}
	plain, err := s.aead.Open(nil, sealed[:n], sealed[n:], []byte(purpose))
	if err != nil {
		return nil, fleet.Wrap(err, fleet.KindInternal, "a sealed secret does not open; seal.key is not the one that this database was made with")
	}
	return plain, nil
}
