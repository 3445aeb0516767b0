package session

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"golang.org/x/crypto/ssh"
)

// fingerprintKey and wireKey name, in the handshake's permissions, the key that signed.
const (
	fingerprintKey = "carrel-fingerprint"
	wireKey        = "carrel-key"
)

var errUnknownKey = errors.New("this key is not registered")

func keySet(keys []ssh.PublicKey) map[string]bool {
	set := make(map[string]bool, len(keys))
	for _, k := range keys {
		set[string(k.Marshal())] = true
	}
	return set
}

// handshake lets in only a registered key, under the workspace's login. Who it was is read from the finished handshake:
// keys that were merely offered leave no trace.
func (s *Server) handshake(raw net.Conn) (*ssh.ServerConn, <-chan ssh.NewChannel, <-chan *ssh.Request, error) {
	cfg, err := s.serverConfig()
	if err != nil {
		return nil, nil, nil, err
	}
	if err := raw.SetDeadline(time.Now().Add(s.cfg.Limits.Handshake)); err != nil {
		return nil, nil, nil, fmt.Errorf("set login deadline: %w", err)
	}
	conn, channels, requests, err := ssh.NewServerConn(raw, cfg)
	if err != nil {
		return nil, nil, nil, err
	}
	if err := raw.SetDeadline(time.Time{}); err != nil {
		return nil, nil, nil, fmt.Errorf("clear login deadline: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.conn = conn
	s.loggedIn = conn.Permissions.Extensions[wireKey]
	if !s.keys[s.loggedIn] { // taken off the list while the handshake went on
		conn.Close()
		return nil, nil, nil, ErrRevoked
	}
	return conn, channels, requests, nil
}

func (s *Server) serverConfig() (*ssh.ServerConfig, error) {
	cfg := &ssh.ServerConfig{
		ServerVersion: "SSH-2.0-Carrel",
		// The library counts a rejected key against this number only after as many have been rejected for free.
		MaxAuthTries:      max(s.cfg.Limits.AuthTries/2, 1),
		PublicKeyCallback: s.checkKey,
	}
	// aes128-gcm first: the fastest of those that OpenSSH clients have; a client's own order still decides.
	cfg.Ciphers = []string{
		ssh.CipherAES128GCM, ssh.CipherAES256GCM, ssh.CipherChaCha20Poly1305, ssh.CipherAES128CTR, ssh.CipherAES256CTR,
	}
	cfg.AddHostKey(s.cfg.Signer)
	if s.cfg.Certificate != nil {
		signer, err := ssh.NewCertSigner(s.cfg.Certificate, s.cfg.Signer)
		if err != nil {
			return nil, fmt.Errorf("host certificate: %w", err)
		}
		cfg.AddHostKey(signer)
	}
	return cfg, nil
}

func (s *Server) checkKey(meta ssh.ConnMetadata, key ssh.PublicKey) (*ssh.Permissions, error) {
	if meta.User() != s.cfg.Account.Login {
		return nil, fmt.Errorf("log in as %s, not %s", s.cfg.Account.Login, printable(meta.User()))
	}
	wire := string(key.Marshal())
	s.mu.Lock()
	known := s.keys[wire]
	s.mu.Unlock()
	if !known {
		return nil, errUnknownKey
	}
	return &ssh.Permissions{Extensions: map[string]string{wireKey: wire, fingerprintKey: ssh.FingerprintSHA256(key)}}, nil
}

// keepAlive asks the client from time to time; one that is gone without a word does not hold its processes for ever.
func (s *Server) keepAlive(ctx context.Context, conn ssh.Conn) {
	answered := make(chan error, 1)
	waiting, misses := false, 0
	tick := time.NewTicker(s.cfg.Limits.KeepAlive)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return // an answer still to come has room, and ends with the connection
		case err := <-answered:
			waiting, misses = false, 0
			if err != nil {
				return
			}
		case <-tick.C:
			if waiting {
				if misses++; misses >= s.cfg.Limits.KeepAliveMisses {
					s.cancel(errors.New("client does not answer"))
				}
				continue
			}
			waiting = true
			s.start(func() {
				_, _, err := conn.SendRequest("keepalive@openssh.com", true, nil)
				answered <- err
			})
		}
	}
}
