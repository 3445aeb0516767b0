package agent

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/carrel-dev/carrel/agent/host"
	"github.com/carrel-dev/carrel/agent/link"
)

// Identity is who this host is to its gateway. It lies in the data directory, readable by its owner alone.
type Identity struct {
	HostID  string             `json:"host_id,omitempty"` // empty before it joined
	Name    string             `json:"name,omitempty"`
	Gateway string             `json:"gateway,omitempty"` // base URL
	CA      []byte             `json:"ca,omitempty"`      // PEM of the gateway's own CA; empty: a publicly trusted one
	Key     ed25519.PrivateKey `json:"key"`
}

// identityFile is the identity's name in the data directory.
const identityFile = "identity.json"

// LoadIdentity reads the identity of a data directory, and makes its key at the first time.
func LoadIdentity(dir string) (Identity, error) {
	path := filepath.Join(dir, identityFile)
	content, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		_, key, err := ed25519.GenerateKey(rand.Reader)
		if err != nil {
			return Identity{}, fmt.Errorf("make the host's key: %w", err)
		}
		id := Identity{Key: key}
		return id, id.Save(dir)
	}
	if err != nil {
		return Identity{}, fmt.Errorf("read the host's identity: %w", err)
	}
	if err := private(path); err != nil {
		return Identity{}, err
	}
	var id Identity
	if err := json.Unmarshal(content, &id); err != nil || len(id.Key) != ed25519.PrivateKeySize {
		return Identity{}, fmt.Errorf("the host's identity %s cannot be read; restore it, or move it away and join again", path)
	}
	return id, nil
}

// Save puts the identity on disk.
func (id Identity) Save(dir string) error {
	content, err := json.Marshal(id)
	if err == nil {
		err = os.MkdirAll(dir, 0o700)
	}
	if err == nil {
		err = host.WriteDurably(filepath.Join(dir, identityFile), content, 0o600)
	}
	if err != nil {
		return fmt.Errorf("keep the host's identity: %w", err)
	}
	return nil
}

// PublicKey is what the gateway knows the host by.
func (id Identity) PublicKey() ed25519.PublicKey {
	public, _ := id.Key.Public().(ed25519.PublicKey)
	return public
}

// TLS is how the gateway is verified; nil trusts the system's roots.
func (id Identity) TLS() (*tls.Config, error) {
	if len(id.CA) == 0 {
		return nil, nil
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(id.CA) {
		return nil, errors.New("the gateway's CA in the host's identity cannot be read; join again")
	}
	return &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}, nil
}

// JoinRequest is what joining needs.
type JoinRequest struct {
	DataDir   string
	Token     string // as `carrel host token` prints it
	Name      string // empty: the machine's host name
	Version   string
	PlainHTTP bool // plain HTTP beyond this machine is allowed
}

// Join turns a join token into an identity, and keeps it. The key that the data directory has is kept too.
func Join(ctx context.Context, r JoinRequest) (Identity, error) {
	token, err := link.ParseJoinToken(r.Token)
	if err != nil {
		return Identity{}, err
	}
	if !r.PlainHTTP {
		if err := link.CheckGateway(token.Gateway); err != nil {
			return Identity{}, err
		}
	}
	id, err := LoadIdentity(r.DataDir)
	if err != nil {
		return Identity{}, err
	}
	if r.Name == "" {
		if r.Name, err = os.Hostname(); err != nil {
			return Identity{}, fmt.Errorf("find the host's name: %w", err)
		}
	}
	joined, err := link.Join(ctx, token, r.Name, id.PublicKey(), r.Version)
	if err != nil {
		return Identity{}, err
	}
	id.HostID, id.Name, id.Gateway, id.CA = joined.HostID, joined.Name, token.Gateway, joined.CA
	return id, id.Save(r.DataDir)
}

// labelKey reads the key that signs container labels, and makes it at the first time.
func labelKey(dir string) ([]byte, error) {
	path := filepath.Join(dir, "labels.key")
	key, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		key = make([]byte, 32)
		rand.Read(key)
		return key, host.WriteDurably(path, key, 0o600)
	}
	if err != nil {
		return nil, fmt.Errorf("read the key of container labels: %w", err)
	}
	if len(key) != 32 {
		return nil, fmt.Errorf("%s is not whole; restore it: without it this host's containers are not known as its own", path)
	}
	return key, private(path)
}

// private refuses a secret that others can read.
func private(path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if info.Mode().Perm()&0o077 != 0 {
		return fmt.Errorf("%s can be read by others: chmod 600 %s", path, path)
	}
	return nil
}
