// E2B's SDK of npm against E2B's API of a farm: what it does to sandboxes, as e2b_sdk.py does with the one for Python.
// Run by a node that finds `e2b` (scripts/harnesses installs both), with E2B_API_URL, E2B_SANDBOX_URL and
// E2B_API_KEY set. It prints a line for each check, and how many failed.
const assert = require('node:assert/strict')
const { randomUUID } = require('node:crypto')
const { NotFoundError, Sandbox, SandboxError } = require('e2b')

async function sandbox(use, asked = {}) {
  const box = await Sandbox.create('base', { timeoutMs: 120_000, ...asked })
  try {
    await use(box)
  } finally {
    await box.kill()
  }
}

const checks = {
  async 'a sandbox is listed until it is killed'() {
    const metadata = { mark: randomUUID() }
    const listed = async () =>
      (await Sandbox.list({ query: { metadata, state: ['running'] } }).nextItems()).map((one) => one.sandboxId)
    await sandbox(async (box) => {
      assert.deepEqual(await listed(), [box.sandboxId])
      assert.deepEqual((await box.getInfo()).metadata, metadata)
    }, { metadata })
    assert.deepEqual(await listed(), [])
  },

  async 'timeouts are changed'() {
    await sandbox(async (box) => {
      await box.setTimeout(1_000_000)
      const leftMs = (await box.getInfo()).endAt.getTime() - Date.now()
      assert.ok(leftMs > 900_000 && leftMs <= 1_000_000, `${leftMs}`)
    })
  },

  async 'a pause is continued by connecting'() {
    await sandbox(async (box) => {
      await box.pause()
      assert.equal((await box.getInfo()).state, 'paused')
      const again = await Sandbox.connect(box.sandboxId, { timeoutMs: 120_000 })
      assert.equal(again.sandboxId, box.sandboxId)
      assert.equal((await again.getInfo()).state, 'running')
    })
  },

  async 'what is missing is said'() {
    await assert.rejects(Sandbox.create('no-such-template'), (error) => error instanceof SandboxError)
    await assert.rejects(Sandbox.connect('nosuchsandbox'), (error) => error instanceof NotFoundError)
    assert.equal(await Sandbox.kill('nosuchsandbox'), false)
  },
}

async function main() {
  let failed = 0
  for (const [name, check] of Object.entries(checks)) {
    try {
      await check()
      console.log(`ok ${name}`)
    } catch (error) {
      failed += 1
      console.log(`FAILED ${name}`)
      console.error(error)
    }
  }
  console.log(`${Object.keys(checks).length - failed} passed, ${failed} failed`)
  process.exitCode = failed ? 1 : 0
}

main()
