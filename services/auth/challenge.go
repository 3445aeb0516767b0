package auth

import (
	"crypto/ed25519"
	"encoding/base64"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
)

// challengeLife is how long an agent has to sign a nonce.
const challengeLife = 30 * time.Second

// Challenges issues nonces that hosts sign in order to prove who they are.
type Challenges struct{ tickets *Tickets[string] }

// NewChallenges returns a set that holds at most most open nonces.
func NewChallenges(most int) *Challenges {
	return &Challenges{tickets: NewTickets[string](challengeLife, most)}
}

// Issue returns 32 random bytes for one host.
func (c *Challenges) Issue(host string, now time.Time) ([]byte, error) {
	text, _, err := c.tickets.Issue(host, now)
	if err != nil {
		return nil, err
	}
	return base64.RawURLEncoding.DecodeString(text)
}

// Proof returns what a host signs with its ed25519 key: a fixed label, its id and the nonce, so that the signature means nothing elsewhere.
func Proof(host string, nonce []byte) []byte {
	return append([]byte("carrel-link-v1\n"+host+"\n"), nonce...)
}

// Verify takes the nonce, which is good once, and checks the signature over it. KindUnauthenticated.
func (c *Challenges) Verify(host string, nonce, signature []byte, key ed25519.PublicKey, now time.Time) error {
	issuedTo, err := c.tickets.Use(base64.RawURLEncoding.EncodeToString(nonce), now)
	if err != nil || issuedTo != host || len(key) != ed25519.PublicKeySize || !ed25519.Verify(key, Proof(host, nonce), signature) {
		return fleet.Errorf(fleet.KindUnauthenticated, "the host's proof does not hold; if this host was set up anew, join it again with `carreld agent --join TOKEN`")
	}
	return nil
}
