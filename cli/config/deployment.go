package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"

	"github.com/carrel-dev/carrel/cli/wholefile"
)

const (
	recordFile     = "deployment.json"
	tokenFile      = "token"
	caFile         = "ca.pem"
	keyFile        = "id_ed25519"
	knownHostsFile = "known_hosts"
)

// Deployment is one gateway that a person has signed in to.
type Deployment struct {
	Name          string   `json:"name"`                     // local name
	Gateway       string   `json:"gateway"`                  // https://HOST[:PORT], http only on loopback
	User          string   `json:"user"`                     // who is signed in
	CAFingerprint string   `json:"ca_fingerprint,omitempty"` // base64url SHA-256 of the gateway's own CA, else empty
	KeyID         string   `json:"key_id,omitempty"`         // device key as the gateway knows it
	Hosts         []Host   `json:"hosts,omitempty"`          // as last learnt
	HostCAKeys    []string `json:"host_ca_keys,omitempty"`   // authorized_keys form
	SSHOptions    []string `json:"ssh_options,omitempty"`    // lines for each Host block, as chosen by `ssh-config`

	dir   Dir
	token string // not from the file: from the environment
}

// Host is a workspace as ssh needs to know it.
type Host struct {
	WorkspaceID string `json:"workspace_id"`
	Workspace   string `json:"workspace"`
	Login       string `json:"login"`
	Principal   string `json:"principal"`
}

// FromEnvironment makes a deployment of CARREL_GATEWAY and CARREL_TOKEN, for programs; nothing of it is stored.
func FromEnvironment(gateway, token string) (Deployment, error) {
	base, err := CheckGateway(gateway)
	if err != nil {
		return Deployment{}, fmt.Errorf("CARREL_GATEWAY: %w", err)
	}
	return Deployment{Name: "env", Gateway: base, token: strings.TrimSpace(token)}, nil
}

// Stored reports whether the deployment has files, as one that was signed in to.
func (d Deployment) Stored() bool { return d.dir != "" }

// CheckGateway returns a gateway's address in its one form, or says what is wrong with it.
func CheckGateway(address string) (string, error) {
	u, err := url.Parse(address)
	if err != nil || u.Host == "" || (u.Scheme != "https" && u.Scheme != "http") {
		return "", fmt.Errorf("%q is not a gateway's address: need https://HOST:PORT", address)
	}
	if u.User != nil || u.RawQuery != "" || strings.Trim(u.Path, "/") != "" {
		return "", fmt.Errorf("%q: a gateway's address has only scheme, host and port", u.Redacted())
	}
	if u.Scheme == "http" && !Loopback(u.Hostname()) {
		return "", fmt.Errorf("http://%s: plain http is only for this machine (127.0.0.1, ::1, localhost); use https", u.Host)
	}
	return u.Scheme + "://" + strings.ToLower(u.Host), nil
}

// Loopback reports whether a host is this machine.
func Loopback(host string) bool {
	if host == "localhost" || strings.HasSuffix(host, ".localhost") {
		return true
	}
	ip := net.ParseIP(host)
	return ip != nil && ip.IsLoopback()
}

// New returns a deployment that is to be kept in d.
func (d Dir) New(name, gateway string) Deployment {
	return Deployment{Name: name, Gateway: gateway, dir: d}
}

// Load reads a deployment.
func (d Dir) Load(name string) (Deployment, error) {
	if err := CheckDeploymentName(name); err != nil {
		return Deployment{}, err
	}
	b, err := os.ReadFile(filepath.Join(d.deployment(name), recordFile))
	if errors.Is(err, fs.ErrNotExist) {
		return Deployment{}, fmt.Errorf("deployment %q: %w", name, fs.ErrNotExist)
	}
	if err != nil {
		return Deployment{}, err
	}
	dep := Deployment{}
	if err := json.Unmarshal(b, &dep); err != nil {
		return Deployment{}, fmt.Errorf("%s is damaged (%w): run `carrel login` again", filepath.Join(d.deployment(name), recordFile), err)
	}
	base, err := CheckGateway(dep.Gateway)
	if err != nil {
		return Deployment{}, fmt.Errorf("%s: %w", filepath.Join(d.deployment(name), recordFile), err)
	}
	dep.Name, dep.Gateway, dep.dir = name, base, d
	return dep, nil
}

// Save writes the record; the deployment exists from then on.
func (d Deployment) Save() error {
	if err := d.MakeDir(); err != nil {
		return err
	}
	b, err := json.MarshalIndent(d, "", "  ")
	if err != nil {
		return err
	}
	_, err = wholefile.Write(d.path(recordFile), append(b, '\n'))
	return err
}

// MakeDir makes the deployment's directory, for its owner alone.
func (d Deployment) MakeDir() error {
	if err := d.dir.Make(); err != nil {
		return err
	}
	if err := os.MkdirAll(d.dir.deployment(d.Name), 0o700); err != nil {
		return err
	}
	return os.Chmod(d.dir.deployment(d.Name), 0o700)
}

// Remove deletes all files of the deployment, the secrets first.
func (d Deployment) Remove() error {
	for _, f := range []string{tokenFile, keyFile} {
		if err := os.Remove(d.path(f)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return os.RemoveAll(d.dir.deployment(d.Name))
}

// SetDefault makes the deployment the one that commands take and that has the short ssh names.
func (d Deployment) SetDefault() error {
	_, err := wholefile.Write(filepath.Join(string(d.dir), defaultFile), []byte(d.Name+"\n"))
	return err
}

// Token returns the token; empty where nobody is signed in.
func (d Deployment) Token() (string, error) {
	if !d.Stored() {
		return d.token, nil
	}
	b, err := os.ReadFile(d.path(tokenFile))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	return strings.TrimSpace(string(b)), err
}

// SaveToken writes the token to a file of mode 0600; a symbolic link in its place is refused.
func (d Deployment) SaveToken(token string) error {
	return wholefile.WriteSecret(d.path(tokenFile), []byte(token+"\n"))
}

// CA returns the gateway's own CA as PEM, nil where it has none.
func (d Deployment) CA() ([]byte, error) {
	if !d.Stored() || d.CAFingerprint == "" {
		return nil, nil
	}
	return os.ReadFile(d.path(caFile))
}

// SaveCA writes the gateway's own CA.
func (d Deployment) SaveCA(pem []byte) error {
	_, err := wholefile.Write(d.path(caFile), pem)
	return err
}

// SaveKey writes the device key pair: the private part in OpenSSH's form, the public part beside it.
func (d Deployment) SaveKey(private, public []byte) error {
	if err := wholefile.WriteSecret(d.path(keyFile), private); err != nil {
		return err
	}
	_, err := wholefile.Write(d.path(keyFile+".pub"), public)
	return err
}

// PublicKey returns the device key's public part in authorized_keys form; empty where there is none.
func (d Deployment) PublicKey() string {
	b, err := os.ReadFile(d.path(keyFile + ".pub"))
	if err != nil {
		return ""
	}
	if _, err := os.Stat(d.path(keyFile)); err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// KeyPath, KnownHostsPath and TokenPath are where the files lie.
func (d Deployment) KeyPath() string { return d.path(keyFile) }

// KnownHostsPath is the known_hosts file of this deployment alone.
func (d Deployment) KnownHostsPath() string { return d.path(knownHostsFile) }

// TokenPath is the token's file.
func (d Deployment) TokenPath() string { return d.path(tokenFile) }

// Dir is the directory that it is kept in.
func (d Deployment) Dir() Dir { return d.dir }

func (d Deployment) path(file string) string { return filepath.Join(d.dir.deployment(d.Name), file) }
