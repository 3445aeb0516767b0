package auth

import (
	"crypto/ed25519"
	"crypto/rand"
	"encoding/pem"
	"fmt"
	"strings"
	"time"

	"golang.org/x/crypto/ssh"
)

// Host certificates (DESIGN D10): how long they last, how far back they begin so that a laptop whose clock is behind accepts them,
// and when a new one is made.
const (
	HostCertificateLife  = 30 * 24 * time.Hour
	HostCertificateEarly = 2 * 24 * time.Hour
	HostCertificateRenew = 10 * 24 * time.Hour
)

// HostCA signs the host keys of workspaces.
type HostCA struct {
	signer ssh.Signer
	sealer *Sealer
}

// HostCA returns the deployment's SSH host CA; its key lies in ssh-host-ca, sealed.
func (d *KeyDir) HostCA(sealer *Sealer) (*HostCA, error) {
	sealed, err := d.load("ssh-host-ca", func() ([]byte, error) {
		key, err := newHostKey("carrel host ca")
		if err != nil {
			return nil, err
		}
		return sealer.Seal(key, "ssh-host-ca"), nil
	})
	if err != nil {
		return nil, err
	}
	key, err := sealer.Open(sealed, "ssh-host-ca")
	if err != nil {
		return nil, err
	}
	signer, err := ssh.ParsePrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("read ssh host ca: %w", err)
	}
	return &HostCA{signer: signer, sealer: sealer}, nil
}

// PublicKey returns the CA's key in authorized_keys form, without a line end.
func (ca *HostCA) PublicKey() string {
	return strings.TrimSpace(string(ssh.MarshalAuthorizedKey(ca.signer.PublicKey())))
}

// NewHostKey makes a workspace's host key, sealed for its purpose.
func (ca *HostCA) NewHostKey(purpose string) ([]byte, error) {
	key, err := newHostKey("")
	if err != nil {
		return nil, err
	}
	return ca.sealer.Seal(key, purpose), nil
}

// HostIdentity opens a sealed host key and signs it for one principal. It returns the key as an OpenSSH private key file and the
// certificate in authorized_keys form.
func (ca *HostCA) HostIdentity(sealed []byte, purpose, principal string, now time.Time) (key []byte, certificate string, err error) {
	key, err = ca.sealer.Open(sealed, purpose)
	if err != nil {
		return nil, "", err
	}
	signer, err := ssh.ParsePrivateKey(key)
	if err != nil {
		return nil, "", fmt.Errorf("read host key of %s: %w", principal, err)
	}
	cert := &ssh.Certificate{
		Key:             signer.PublicKey(),
		CertType:        ssh.HostCert,
		KeyId:           principal,
		ValidPrincipals: []string{principal},
		ValidAfter:      uint64(now.Add(-HostCertificateEarly).Unix()),
		ValidBefore:     uint64(now.Add(HostCertificateLife).Unix()),
	}
	if err := cert.SignCert(rand.Reader, ca.signer); err != nil {
		return nil, "", fmt.Errorf("sign host key of %s: %w", principal, err)
	}
	return key, strings.TrimSpace(string(ssh.MarshalAuthorizedKey(cert))), nil
}

func newHostKey(comment string) ([]byte, error) {
	_, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, err
	}
	block, err := ssh.MarshalPrivateKey(private, comment)
	if err != nil {
		return nil, err
	}
	return pem.EncodeToMemory(block), nil
}
