// Package auth knows who may do what: secrets and their hashes, the policy of each procedure, the sealed keys and the two certificate authorities of a deployment.
package auth
